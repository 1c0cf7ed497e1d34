"""Reward functions that fail in every way, one line each: the code, and what the error says."""

import re
import signal
import threading
import time

import pytest

from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.rewards import RewardScorer

in_processes = pytest.mark.own_run("grpo: its reward function does not fail")

EVIL = """
import asyncio, os, signal, sys, time

class Own(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise KeyboardInterrupt

class Proud(Exception):
    def __str__(self):
        class Text(str):
            def __format__(self, spec):
                raise Own
        return Text("x")

class Nameless(type):
    @property
    def __name__(self):
        raise Own

class Anonymous(Exception, metaclass=Nameless):
    pass

class Shy:
    def __repr__(self):
        raise Own

class Float(float):
    def __float__(self):
        raise Own

class Table(dict):
    def items(self):
        raise Own

class Chameleon:
    @property
    def __class__(self):
        raise Own
"""

RAISED = [
    # name, what the function does, what the error says
    ("KeyboardInterrupt", "raise KeyboardInterrupt", r"raised KeyboardInterrupt: +at .*mine\.py:\d+, in score"),
    ("SystemExit", "sys.exit(0)", r"raised SystemExit: 0 at"),
    ("StopIteration", "raise StopIteration", r"raised (StopIteration|RuntimeError: coroutine raised StopIteration)"),
    ("CancelledError", "raise asyncio.CancelledError", r"raised CancelledError"),
    ("a BaseException of its own", "raise Own('x')", r"raised Own: x at"),
    ("an exception without text", "raise Mute", r"raised Mute: \(its text is missing: __str__ raised"),
    ("a text that cannot be formatted", "raise Proud", r"an exception that cannot be shown \(showing it raised"),
    ("a class without a name", "raise Anonymous", r"an exception that cannot be shown \(showing it raised Own\)"),
    ("a text of 10 MB", "raise ValueError('x' * 10**7)", r"raised ValueError: x{1900}"),
    ("lone surrogates", "raise ValueError('\\ud800')", r"raised ValueError: \\?.* at"),
    ("endless recursion", "return score(**sample)", r"raised RecursionError|exceeded"),
    ("NaN", "return float('nan')", r"returned nan, which is not a finite number"),
    ("an integer of 5,000 digits", "return 10**5000", r"raised ValueError: Exceeds the limit"),
    ("a nested list", "return [[1.0]]", r"returned \[\[1\.0\]\], which is not a finite number"),
    ("an object without repr", "return Shy()", r"raised Own"),
    ("a key without repr", "return {Shy(): 1.0}", r"raised Own"),
    ("a number that cannot be converted", "return Float(1.0)", r"raised Own"),
    ("a dict that cannot be read", "return Table(score=1.0)", r"raised Own"),
    ("an object without a class", "return Chameleon()", r"raised Own"),
]

ENDED = [
    # name, what the function does in a process of its own, what the error says
    ("os._exit", "os._exit(5)", r"ended its process: exit status 5"),
    ("a signal to itself", "os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(99)", r"process: killed by SIGTERM"),
    ("exec", "os.execv('/bin/true', ['true'])", r"ended its process: exit status 0"),
    ("no descriptors", "os.closerange(3, 999)", r"ended its process: exit status"),
    ("a loop", "while True: pass", r"took longer than reward\.timeout_s=1\.0"),
    ("a stopped process", "os.kill(os.getpid(), signal.SIGSTOP)", r"took longer than reward\.timeout_s=1\.0"),
    (
        "a stopped supervisor",
        "os.kill(os.getppid(), signal.SIGSTOP)\n    time.sleep(99)",
        r"took longer than reward\.tim",
    ),
    ("a killed supervisor", "os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(99)", r"process: killed by SIGKILL"),
    ("memory without end", "kept = []\n    while True: kept.append(bytes(10**7))", r"raised MemoryError|MemoryError"),
    ("a text of 300 MB", "return 'x' * 3 * 10**8", r"MemoryError|has 300000\d* bytes as JSON, more than 268435456"),
]

IMPORTED = [
    # name, code of the file, what the error says
    ("a syntax error", "def score(:", r"running .*mine\.py failed: SyntaxError"),
    ("NUL bytes", "\0", r"running .*mine\.py failed: (SyntaxError|ValueError): source code (string|cannot).*null"),
    ("an import that fails", "import no_such_module", r"failed: ModuleNotFoundError: No module named"),
    ("sys.exit", "import sys; sys.exit(0)", r"failed: SystemExit: 0"),
    ("KeyboardInterrupt", "raise KeyboardInterrupt", r"failed: KeyboardInterrupt: "),
    ("a BaseException of its own", "class Own(BaseException): pass\nraise Own('x')", r"failed: Own: x"),
    (
        "an exception without text",
        "class Mute(BaseException):\n    def __str__(self): raise self\nraise Mute",
        r"failed: an exception whose text is missing: __str__ raised Mute",
    ),
    ("a text of 10 MB", "raise ValueError('x' * 10**7)", r"failed: ValueError: x{1900}"),
    ("no function", "score = 3", r"has no function 'score'; it has no functions"),
    ("endless recursion", "def f(): f()\nf()", r"failed: RecursionError"),
    ("wrong arguments", "def score(x): pass", r"is score\(x\), but it is called with the keyword arguments"),
]

IMPORTED_ALONE = [
    ("os._exit", "import os; os._exit(5)", r"the import of reward function '.*' ended its process: exit status 5"),
    ("a crash", "import ctypes; ctypes.string_at(0)", r"ended its process: killed by SIGSEGV"),
    ("a loop", "while True: pass", r"the import of reward function '.*mine\.py:score' took longer than 2 s, the"),
    ("memory without end", "kept = []\nwhile True: kept.append(bytes(10**7))", r"mine\.py failed: MemoryError"),
    ("a stopped process", "import os; os.kill(os.getpid(), 19)", r"took longer than 2 s, the limit for starting"),
]


def cases(table):
    """Return the columns of a table without its names."""
    return [case[1:] for case in table]


def ids(table):
    return [case[0] for case in table]


def source(body, form="def"):
    if form == "batch":
        return f"{EVIL}\ndef score(data_sources, solution_strs, ground_truths, extra_infos):\n    {body}\n"
    wait = "await " if form == "async def" else ""
    return f"{EVIL}\n{form} score(**sample):\n    {body.replace('score(**', f'{wait}score(**')}\n"


def assert_fails(scorer, message):
    with pytest.raises(RewardError) as error:
        scorer.score(["a"], ["d"], [None])
    assert re.search(message, str(error.value)), str(error.value)[:2000]
    assert "The sample:" in str(error.value)
    assert len(str(error.value)) < 5000


@pytest.mark.parametrize("form", ["def", "async def"])
@pytest.mark.parametrize(("body", "message"), cases(RAISED), ids=ids(RAISED))
def test_whatever_a_function_raises_or_returns_is_its_failure(file, form, body, message):
    file.write_text(source(body, form))
    assert_fails(RewardScorer(f"{file}:score"), message)


@pytest.mark.runs
@in_processes
@pytest.mark.sampled
@pytest.mark.parametrize("form", ["def", "async def"])
@pytest.mark.parametrize(("body", "message"), cases(RAISED), ids=ids(RAISED))
def test_whatever_a_function_raises_in_a_process_is_its_failure(file, runner, form, body, message):
    file.write_text(source(body, form))
    assert_fails(RewardScorer(runner=runner()), message)


@pytest.mark.runs
@in_processes
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "Own"])
def test_whatever_a_batch_function_raises_is_its_failure(file, runner, error):
    file.write_text(source(f"raise {error}('x')", "batch"))
    assert_fails(RewardScorer(runner=runner()), f"raised {error}: x at")
    assert_fails(RewardScorer(f"{file}:score"), f"raised {error}: x at")


@pytest.mark.runs
@in_processes
@pytest.mark.parametrize(("body", "message"), cases(ENDED), ids=ids(ENDED))
def test_a_function_that_ends_its_process_is_a_failed_sample(file, runner, body, message):
    file.write_text(source(body))
    timeout_s = 1.0 if "reward\\.tim" in message else 200.0
    assert_fails(RewardScorer(runner=runner(timeout_s=timeout_s, memory_bytes=2**28)), message)


@pytest.mark.parametrize(("code", "message"), cases(IMPORTED), ids=ids(IMPORTED))
def test_a_file_that_cannot_be_imported_is_one_error(file, code, message):
    file.write_text(code)
    with pytest.raises(RewardConfigError, match=message) as error:
        RewardScorer(f"{file}:score")
    assert len(str(error.value)) < 5000


@pytest.mark.runs
@in_processes
@pytest.mark.sampled
@pytest.mark.parametrize(("code", "message"), cases(IMPORTED + IMPORTED_ALONE), ids=ids(IMPORTED + IMPORTED_ALONE))
def test_a_file_that_ends_its_process_at_import_is_one_error(file, runner, monkeypatch, code, message):
    if "2 s" in message:
        monkeypatch.setattr("hybridflow.rewards.runner.START_TIMEOUT_S", 2.0)
    file.write_text(code)
    with pytest.raises(RewardError, match=message) as error:
        runner(timeout_s=None, memory_bytes=2**28).start()
    assert len(str(error.value)) < 5000


def test_a_file_that_loops_at_import_is_one_error_in_the_rank_too(file, monkeypatch):
    monkeypatch.setattr("hybridflow.runtime.user_import.IMPORT_LIMIT_S", 0.5)
    file.write_text("while True: pass")
    with pytest.raises(RewardConfigError, match=r"mine\.py:score': the import took longer than 0\.5 s; move slow work"):
        RewardScorer(f"{file}:score")


@pytest.mark.parametrize("form", ["def", "async def"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_a_function_of_the_rank_is_still_an_interrupt(file, form, number):
    wait = "await asyncio.sleep(99)" if form == "async def" else "time.sleep(99)"
    file.write_text(source(f"os.mkdir({str(file) + '.begun'!r}); {wait}", form))
    begun = file.with_name("mine.py.begun")
    before = signal.signal(number, signal.default_int_handler)
    main_thread = threading.get_ident()

    def interrupt():
        while not begun.exists():
            time.sleep(0.01)
        signal.pthread_kill(main_thread, number)

    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            RewardScorer(f"{file}:score").score(["a"], ["d"], [None])
    finally:
        sender.join()
        signal.signal(number, before)
