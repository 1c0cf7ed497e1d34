"""Reward functions that fail in every way, one line each: the code, and what the error says."""

import re
import signal
import threading

import pytest

from hybridflow.environments.rewards import RewardScorer
from hybridflow.errors import RewardConfigError, RewardError

in_processes = pytest.mark.own_run("grpo: its reward function does not fail")

EVIL = """
import asyncio, os, signal, sys, threading, time

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

class Shy:
    def __repr__(self):
        raise Own

class Float(float):
    def __float__(self):
        raise Own
"""

RAISED = {
    "raise KeyboardInterrupt": r"raised KeyboardInterrupt: +at .*mine\.py:\d+, in score",
    "raise StopIteration": r"raised (StopIteration|RuntimeError: coroutine raised StopIteration)",
    "raise asyncio.CancelledError": r"raised CancelledError",
    "raise Own('x')": r"raised Own: x at",
    "raise Mute": r"raised Mute: \(its text is missing: __str__ raised",
    "raise Proud": r"an exception that cannot be shown \(showing it raised Own\)",
    "raise ValueError('x' * 10**7)": r"raised ValueError: x{1900}",
    "raise ValueError('\\ud800')": r"raised ValueError: \\?.* at",
    "return score(**sample)": r"raised RecursionError|exceeded",
    "return 10**5000": r"raised ValueError: Exceeds the limit",
    "return Shy()": r"raised Own",
    "return {Shy(): 1.0}": r"raised Own",
    "return Float(1.0)": r"raised Own",
}
ENDED = {
    "os.execv('/bin/true', ['true'])": r"ended its process: exit status 0",
    "os.closerange(3, 999)": r"ended its process: exit status",
    "os.kill(os.getpid(), signal.SIGSTOP)": r"took longer than reward\.timeout_s=1\.0",
    "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(99)": r"took longer than reward\.timeout_s=1\.0",
    "return 'x' * 3 * 10**8": r"MemoryError|has 300000\d* bytes as JSON, more than 268435456",
}
IMPORTED = {
    "def score(:": r"running .*mine\.py failed: SyntaxError",
    "\0": r"running .*mine\.py failed: (SyntaxError|ValueError): source code (string|cannot).*null",
    "class Mute(BaseException):\n    def __str__(self): raise self\nraise Mute": r"failed: .* whose text is missing",
    "raise ValueError('x' * 10**7)": r"failed: ValueError: x{1900}",
}
IMPORTED_ALONE = {
    "import sys; sys.exit(0)": r"failed: SystemExit: 0",
    "import os; os._exit(5)": r"the import of reward function '.*' ended its process: exit status 5",
    "while True: pass": r"the import of reward function '.*mine\.py:score' took longer than 2 s, the limit for start",
    "kept = []\nwhile True: kept.append(bytes(10**7))": r"mine\.py failed: MemoryError",
    "import os; os.kill(os.getpid(), 19)": r"took longer than 2 s, the limit for starting",
}


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


@pytest.mark.parametrize(
    "place", ["rank", pytest.param("process", marks=[pytest.mark.runs, in_processes, pytest.mark.sampled])]
)
@pytest.mark.parametrize("form", ["def", "async def"])
@pytest.mark.parametrize(("body", "message"), RAISED.items())
def test_whatever_a_function_raises_or_returns_is_its_failure(file, runner, form, body, message, place):
    file.write_text(source(body, form))
    assert_fails(RewardScorer(f"{file}:score") if place == "rank" else RewardScorer(runner=runner()), message)


@pytest.mark.runs
@in_processes
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "Own"])
def test_whatever_a_batch_function_raises_is_its_failure(file, runner, error):
    file.write_text(source(f"raise {error}('x')", "batch"))
    assert_fails(RewardScorer(runner=runner()), f"raised {error}: x at")
    assert_fails(RewardScorer(f"{file}:score"), f"raised {error}: x at")


@pytest.mark.runs
@in_processes
@pytest.mark.parametrize(("body", "message"), ENDED.items())
def test_a_function_that_ends_its_process_is_a_failed_sample(file, runner, body, message):
    file.write_text(source(body))
    timeout_s = 1.0 if "timeout_s" in message else 200.0
    assert_fails(RewardScorer(runner=runner(timeout_s=timeout_s, memory_bytes=2**28)), message)


@pytest.mark.parametrize(("code", "message"), IMPORTED.items())
def test_a_file_that_cannot_be_imported_is_one_error(file, code, message):
    file.write_text(code)
    with pytest.raises(RewardConfigError, match=message) as error:
        RewardScorer(f"{file}:score")
    assert len(str(error.value)) < 5000


@pytest.mark.runs
@in_processes
@pytest.mark.parametrize(("code", "message"), IMPORTED_ALONE.items())
def test_a_file_that_ends_its_process_at_import_is_one_error(file, runner, monkeypatch, code, message):
    if "2 s" in message:
        monkeypatch.setattr("hybridflow.environments.processes.pool.START_TIMEOUT_S", 2.0)
    file.write_text(code)
    with pytest.raises(RewardError, match=message):
        runner(timeout_s=None, memory_bytes=2**28).start()


@pytest.mark.parametrize("form", ["def", "async def"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_a_function_of_the_rank_is_still_an_interrupt(file, form, number):
    send = f"threading.Timer(0.1, signal.pthread_kill, ({threading.get_ident()}, {int(number)})).start()"
    file.write_text(source(f"{send}; {'await asyncio' if form == 'async def' else 'time'}.sleep(99)", form))
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            RewardScorer(f"{file}:score").score(["a"], ["d"], [None])
    finally:
        signal.signal(number, before)
