"""Plants faults in a clone of the project and tells which its tests catch.

python tests/mutants/judge.py try TREE --only protocol --run ".venv/bin/python -m pytest -x -q tests/protocol"
python tests/mutants/judge.py record TREE --out FOLDER --run "make test" --run "make test-runs"
python tests/mutants/judge.py judge TREE --out FOLDER

TREE is a clone with its own .venv (and .venv-vllm). `try` plants one fault after another and runs commands until one
fails. `record` marks the faults in the source and runs the commands once each, to see which tests reach which fault;
`judge` then plants each and runs only the tests that reach it, the fast ones of its package first, until one fails: a
test that never computes the faulty expression passes as before. It writes FOLDER/verdicts.json.
"""

import argparse
import json
import os
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from faults import Fault, draw_faults

SOURCE = Path("src/hybridflow")


def try_commands(tree: Path, faults: list[Fault], commands: list[str]) -> None:
    """Plant each fault and run the commands until one fails; print what missed it."""
    missed = 0
    for number, fault in enumerate(faults):
        path, start, caught_by = tree / SOURCE / fault.path, time.time(), ""
        with replaced(path, fault.replace(path.read_text(), fault.after)):
            for command in commands:
                environment = os.environ | {"PYTHONPATH": str(tree / "src")}
                ended = subprocess.run(
                    command, shell=True, cwd=tree, env=environment, capture_output=True, text=True, check=False
                )
                if ended.returncode:
                    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                    caught_by = lines[0] if lines else (ended.stdout + ended.stderr)[-200:]
                    break
        missed += not caught_by
        print(
            f"{number:3} {caught_by or 'MISSED':70.70} {time.time() - start:4.0f} s  "
            f"{fault.path}:{fault.line} {fault.kind}: {fault.before!r} -> {fault.after!r}",
            flush=True,
        )
    print(f"{missed} of {len(faults)} missed")


@contextmanager
def replaced(path: Path, text: str) -> Iterator[None]:
    """Give a file another text inside the `with`."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def record(tree: Path, out: Path, faults: list[Fault], commands: list[str]) -> None:
    """Run the commands with every fault's expression marked; write FOLDER/record.jsonl."""
    log = out / "record.jsonl"
    recorder = (Path(__file__).parent / "recorder.py").read_text().replace("@RECORD@", str(log))
    for packages in tree.glob(".venv*/lib/python3*/site-packages"):
        (packages / "fault_recorder.py").write_text(recorder)
    for number, fault in enumerate(faults):
        path = tree / SOURCE / fault.path
        if not fault.path.startswith("rewards/code_"):  # they run in a sandbox, which may not write
            call = f'(__import__("fault_recorder").hit({number}), {fault.before})[1]'
            path.write_text(fault.replace(path.read_text(), call))
    for command in commands:
        start = time.time()
        environment = os.environ | {"PYTEST_ADDOPTS": "-p fault_recorder"}
        ended = subprocess.run(command, shell=True, cwd=tree, env=environment, check=False)
        print(f"{command}: exit status {ended.returncode} after {time.time() - start:.0f} s", flush=True)
    subprocess.run(["git", "checkout", "--quiet", str(SOURCE)], cwd=tree, check=True)


@dataclass(frozen=True)
class Recorded:
    """The seconds of a test that passed, and the environment in which it ran."""

    seconds: float
    venv: str


def read_record(log: Path) -> tuple[dict[int, set[str]], dict[str, Recorded]]:
    """Return the tests that reach each fault, and what is known of each test that passed."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    tests, fixtures, hits = ([one for one in records if key in one] for key in ("test", "fixture", "hit"))
    users = defaultdict(set)
    for test in tests:
        for name in test["fixtures"]:
            users[name].add(test["test"])
    reached: dict[int, set[str]] = defaultdict(set)
    own = {one["pid"] for one in tests}
    for one in hits:
        for interval in fixtures + tests:
            if interval["start"] <= one["time"] <= interval["end"] + 2 and (
                interval["pid"] == one["pid"] or one["pid"] not in own
            ):
                reached[one["hit"]] |= users[interval["fixture"]] if "fixture" in interval else {interval["test"]}
    failed = {one["of"] for one in records if one.get("outcome") in ("failed", "skipped")}
    if missing := [one["test"] for one in tests if "venv" not in one]:
        raise SystemExit(f"error: {log} does not say where {missing[0]} ran: it is of an older version; record again")
    passed = {one["test"]: Recorded(one["end"] - one["start"], one["venv"]) for one in tests}
    passed = {name: one for name, one in passed.items() if name not in failed}
    return {number: found & passed.keys() for number, found in reached.items()}, passed


def judge(
    tree: Path, out: Path, faults: Mapping[int, Fault], limit_s: float, first: Path | None
) -> list[dict[str, Any]]:
    """Plant each fault and run the tests that reach it; return one verdict per fault.

    `first`: a folder with verdicts of other tests of the same faults; a test that caught one there runs first here.
    """
    others = json.loads((first / "verdicts.json").read_text()) if first else []
    catching = {one["fault"]: _name_in(one["caught_by"]) for one in others}
    reached, tests = read_record(out / "record.jsonl")
    _check_names(tree, out, {name: tests[name] for found in reached.values() for name in found})
    verdicts = []
    for number, fault in faults.items():
        package = fault.path.split("/")[0].removesuffix(".py")
        found = reached.get(number, set())
        if fault.path.startswith("rewards/code_"):
            found = {name for name in tests if name.startswith(("tests/environments/", "tests/attacks/test_programs"))}
        order = sorted(found, key=lambda name: (not name.startswith(f"tests/{package}/"), tests[name].seconds, name))
        if catching.get(number) in order:
            order = [catching[number], *order]
        path = tree / SOURCE / fault.path
        start = time.time()
        while True:
            with replaced(path, fault.replace(path.read_text(), fault.after)):
                caught_by = _first_failure(tree, out, [(name, tests[name]) for name in order], limit_s)
                name = _name_in(caught_by)
                is_alone = name in order and _run(tree / tests[name].venv, out, [name]) is not None
            if name not in order or (is_alone and not _run(tree / tests[name].venv, out, [name])):
                break
            order = [one for one in order if one != name]  # it fails without the fault, or only after other tests
        verdicts.append({"fault": number, "tests": len(order), "caught_by": caught_by, **fault.as_dict()})
        print(
            f"{number:3} {caught_by or 'MISSED':60.60} of {len(order):4} in {time.time() - start:4.0f} s  "
            f"{fault.path}:{fault.line} {fault.kind}: {fault.before!r} -> {fault.after!r}",
            flush=True,
        )
        (out / "verdicts.json").write_text(json.dumps(verdicts, indent=1))
    return verdicts


def _name_in(failure: str | None) -> str:
    """Return the name of the test in a line of pytest's summary, without the group that xdist appends."""
    return re.sub("^(FAILED|ERROR) |@[a-z_/.]+$| - .*", "", failure or "")


def _check_names(tree: Path, out: Path, tests: dict[str, Recorded]) -> None:
    """Raise if pytest does not find the tests without a fault: it would not find them with one either."""
    for venv in {test.venv for test in tests.values()}:
        part = sorted(name for name, test in tests.items() if test.venv == venv)
        if failure := _run(tree / venv, out, part, "--collect-only"):
            raise SystemExit(f"{out}: the tests of the record are not those of {tree}: {failure}")


def _first_failure(tree: Path, out: Path, order: list[tuple[str, Recorded]], limit_s: float) -> str | None:
    """Run tests in growing parts; return the first that fails, or None."""
    spent = 0.0
    while order and spent < limit_s:
        sums = accumulate((test.seconds for _, test in order), initial=0.0)
        chosen = [
            one for i, (one, before) in enumerate(zip(order, sums, strict=False)) if i < 20 or before < max(20, spent)
        ]
        order = order[len(chosen) :]
        start = time.time()
        for venv in sorted({test.venv for _, test in chosen}):
            if failure := _run(tree / venv, out, [name for name, test in chosen if test.venv == venv]):
                return failure
        spent += time.time() - start
    return f"(not run: {len(order)} tests)" if order else None


def _run(venv: Path, out: Path, part: list[str], *arguments: str) -> str | None:
    (out / "tests.txt").write_text("\n".join(part))
    long = len(part) > 60 and not arguments
    tests = f"@{out / 'tests.txt'}"
    command = [venv / "bin/python", "-m", "pytest", "-x", "-q", "-m", "", "--timeout=180", tests, *arguments]
    ended = subprocess.run(
        command + (["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"] if long else ["-n", "0"]),
        cwd=venv.parent, capture_output=True, text=True, check=False, timeout=3600,
    )  # fmt: skip
    if ended.returncode == 0:
        return None
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit status {ended.returncode}: {(ended.stdout + ended.stderr)[-300:]}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("draw", "try", "record", "judge"))
    parser.add_argument("tree", type=Path, help="a clone of the project with its own environments")
    parser.add_argument("--out", type=Path, default=Path("mutants"), help="folder of record and verdicts")
    parser.add_argument("--seed", type=int, default=42, help="seed of the drawn faults (default: 42)")
    parser.add_argument("--count", type=int, default=60, help="number of faults (default: 60)")
    parser.add_argument("--only", action="append", default=[], metavar="PACKAGE", help="draw in this package only")
    parser.add_argument("--limit", type=float, default=900, help="seconds of tests per fault (default: 900)")
    parser.add_argument("--fault", type=int, action="append", metavar="N", help="judge this fault; else all")
    parser.add_argument("--first", type=Path, metavar="FOLDER", help="run what caught a fault there first in `judge`")
    parser.add_argument("--run", action="append", default=[], metavar="COMMAND", help="a command of `try` or `record`")
    arguments = parser.parse_args()
    tree, out = arguments.tree.resolve(), arguments.out.resolve()
    if not (tree / SOURCE).is_dir():
        parser.error(f"TREE={tree} is not a clone of the project: {SOURCE} not found")
    if arguments.action == "judge" and not (out / "record.jsonl").exists():
        parser.error(f"--out {out} has no record.jsonl: run `record` with this folder first")
    if wrong := [n for n in arguments.fault or () if not 0 <= n < arguments.count]:
        parser.error(f"--fault {wrong[0]} is not one of 0 to {arguments.count - 1} (--count {arguments.count})")
    if arguments.first and not (arguments.first / "verdicts.json").exists():
        parser.error(f"--first {arguments.first} has no verdicts.json: run `judge` with this folder first")
    if arguments.action in ("try", "record") and not arguments.run:
        parser.error(f"`{arguments.action}` needs a command: --run COMMAND")
    out.mkdir(parents=True, exist_ok=True)
    faults = draw_faults(tree / SOURCE, count=arguments.count, seed=arguments.seed, only=tuple(arguments.only))
    if arguments.action == "draw":
        for number, fault in enumerate(faults):
            print(f"{number:3} {fault.path}:{fault.line} {fault.kind}: {fault.before!r} -> {fault.after!r}")
    elif arguments.action == "try":
        try_commands(tree, faults, arguments.run)
    elif arguments.action == "record":
        record(tree, out, faults, arguments.run)
    else:
        chosen = {n: fault for n, fault in enumerate(faults) if n in (arguments.fault or range(len(faults)))}
        judge(tree, out, chosen, arguments.limit, arguments.first)


if __name__ == "__main__":
    main()
