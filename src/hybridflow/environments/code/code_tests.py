"""Reward for code: runs the last code block of a response in restricted processes, one for each unit test."""

import json
import math
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hybridflow.environments.code.code_checks import Steps, steps_of
from hybridflow.environments.code.code_runner import CodeLimits, CodeRun, run_program
from hybridflow.environments.code.code_statements import idle_error
from hybridflow.environments.rewards.limits import require_seconds, require_whole
from hybridflow.errors import RewardError

MAX_PROGRAM_CHARS = 200_000
MIN_MEMORY_BYTES = 32 * 2**20
"""With less memory the interpreter itself does not start."""

_EXAMPLES = "{'inputs': ['1 2\\n'], 'outputs': ['3\\n']} or {'tests': ['assert add(1, 2) == 3']}"

_Test = tuple[str, str] | Steps


def code_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    partial_credit: bool = False,
    timeout_s: float = 5.0,
    total_timeout_s: float = 30.0,
    memory_bytes: int = 512 * 2**20,
    max_output_bytes: int = 2**20,
    max_tests: int = 0,
) -> dict[str, float]:
    """Score 1.0 if the last Python block passes all tests.

    Returns {"score", "passed": share of passed tests, "compiled": 0 or 1, "unprotected": share of tests whose verdict
    the program could make up}; `partial_credit` scores the share.

    `ground_truth`, or JSON of it, is {"inputs": [text, ...], "outputs": [text, ...]}: what the program reads and must
    print, ignoring spaces at the ends of lines and empty lines at the end. Or it is {"tests": [text, ...]}: statements
    that run after the program, of which a check must run and none fail. `max_tests` limits the run to the first tests;
    0 runs all. docs/rewards.md has the rules.

    Each test has `timeout_s` seconds of CPU time and twice that of wall-clock time, and all together have
    `total_timeout_s` seconds of wall-clock time, which must be less than reward.timeout_s. A test that would start
    later is not run and does not pass; nor are the tests after one that exceeded its time.

    Raises:
        RewardError: The ground truth has another form, statements do not compile or no check runs, a limit is out of
            range, the system lacks Landlock or seccomp filters, or the temporary directory cannot be used.
    """
    require_seconds("timeout_s", timeout_s)
    require_seconds("total_timeout_s", total_timeout_s)
    require_whole("memory_bytes", memory_bytes, least=MIN_MEMORY_BYTES)
    require_whole("max_output_bytes", max_output_bytes, least=1)
    require_whole("max_tests", max_tests, least=0)
    tests = _read_tests(ground_truth, max_tests)
    unprotected = sum(isinstance(test, Steps) and not test.checks for test in tests) / len(tests)
    no_program = {"score": 0.0, "passed": 0.0, "compiled": 0.0, "unprotected": unprotected}
    program = last_code_block(solution_str)
    if program is None or len(program) > MAX_PROGRAM_CHARS:
        return no_program
    limits = CodeLimits(timeout_s, memory_bytes, max_output_bytes, deadline=time.monotonic() + total_timeout_s)
    source = program.encode(errors="surrogatepass")
    num_passed = 0
    for number, test in enumerate(tests):
        if number and time.monotonic() >= limits.deadline:
            break
        if isinstance(test, Steps):
            run = run_program(source, limits, test=test)
            num_passed += run.finished
            if run.is_idle or (run.finished and not test.names_program):
                alone = _run_alone(test, replace(limits, deadline=math.inf))
                if alone.is_idle or alone.finished:  # otherwise the program has skipped the checks
                    problem = idle_error(test.statements, "checks nothing without a program")
                    raise RewardError(f"tests[{number}]: {problem}")
        else:
            given, wanted = test
            run = run_program(source, limits, stdin=given.encode())
            num_passed += run.finished and _lines(run.output.decode(errors="replace")) == _lines(wanted)
        if not run.compiled and number == 0:  # later: the time was over before
            return no_program
        if run.is_late:
            break
    share = num_passed / len(tests)
    score = share if partial_credit else float(share == 1.0)
    return {"score": score, "passed": share, "compiled": 1.0, "unprotected": unprotected}


def _read_tests(ground_truth: Any, max_tests: int) -> Sequence[_Test]:
    """Return (input, output) or the steps of each test, or of the first `max_tests`."""
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            raise _no_tests(ground_truth) from None
    if not isinstance(truth, Mapping):
        raise _no_tests(ground_truth)
    inputs, outputs, tests = (_texts(truth.get(name)) for name in ("inputs", "outputs", "tests"))
    if tests and not inputs and not outputs:
        return [_steps(test, number) for number, test in enumerate(tests[: max_tests or None])]
    if inputs and outputs and len(inputs) == len(outputs) and not tests:
        return list(zip(inputs, outputs, strict=True))[: max_tests or None]
    raise _no_tests(ground_truth)


def _steps(test: str, number: int) -> Steps:
    try:
        return steps_of(test)
    except RewardError as error:
        raise RewardError(f"tests[{number}]: {error}") from None


@lru_cache(maxsize=128)
def _run_alone(test: Steps, limits: CodeLimits) -> CodeRun:
    return run_program(b"", limits, test=test)


def _texts(value: Any) -> list[str]:
    """Return the texts of a list or an array of texts; an empty list for anything else."""
    if value is None or isinstance(value, str | bytes | Mapping):
        return []
    try:
        texts = list(value)
    except TypeError:
        return []
    return texts if all(isinstance(text, str) for text in texts) else []


def _no_tests(ground_truth: Any) -> RewardError:
    return RewardError(
        f"the ground truth must look like {_EXAMPLES}, or be JSON of it, with at least one test, as many outputs as "
        f"inputs, and only texts; got {ground_truth!r:.300}."
    )


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


_FENCE = re.compile(r"[ \t>]*(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)")
_PYTHON = ("py", "python", "python3")


def last_code_block(text: str) -> str | None:
    """Return the last block labeled as Python, else the last unlabeled block, else None.

    A fence is three or more backticks or tildes. It is closed by as many, which may follow the last line of the program
    on the same line. A block that is not closed does not count.
    """
    labeled: str | None = None
    unlabeled: str | None = None
    fence = language = ""
    lines: list[str] = []
    for line in text.split("\n"):
        if not fence:
            match = _FENCE.match(line)
            if match:
                fence, lines = match["fence"], []
                language = (match["info"].split() or [""])[0].strip("{}.").lower()
            continue
        stripped = line.strip()
        is_end = stripped.startswith(fence) and not stripped.strip(fence[0])
        if not is_end and not (stripped.endswith(fence) and fence[0] == "`" and stripped.count(fence) == 1):
            lines.append(line)
            continue
        if not is_end:
            lines.append(line.rstrip().removesuffix(fence))
        program = textwrap.dedent("\n".join(lines))
        if language in _PYTHON:
            labeled = program
        elif not language:
            unlabeled = program
        fence = ""
    return unlabeled if labeled is None else labeled
