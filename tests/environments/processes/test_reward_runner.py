"""Failing reward functions in separate processes: the other samples keep their scores."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.reward_samples import samples
from hybridflow.environments.processes.user_process import UserProcess
from hybridflow.environments.rewards import RewardRunner, RewardScorer
from hybridflow.environments.rewards.in_rank import call_here
from hybridflow.errors import RewardError
from hybridflow.runtime.progress import progress

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: no function of a run hangs, crashes or is killed")]

FUNCTIONS = """
import asyncio, ctypes, os, random, sys, time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("do "):
        exec(solution_str.removeprefix("do "), globals())
    print("a function may print")
    ground_truth["changed"] = True
    return {"score": len(solution_str), "answer": solution_str, "object": object(), "process": os.getpid()}

def noisy(**sample):
    return random.random()

def waits_once(directory):
    open(os.path.join(directory, str(os.getpid())), "w").close()
    return len(os.listdir(directory)) == 1

def killed_once(solution_str, directory, **_):
    while waits_once(directory):
        time.sleep(0.01)
    return len(solution_str)

async def killed_once_async(solution_str, directory, **_):
    while waits_once(directory):
        await asyncio.sleep(0.01)
    return len(solution_str)

async def at_once(data_source, solution_str, ground_truth, extra_info):
    directory, number = os.path.split(solution_str)
    open(solution_str, "w").close()
    while len(os.listdir(directory)) < 2:
        await asyncio.sleep(0.01)
    return float(number)
"""

LOOP, RAISE = "do while True: pass", "do raise ValueError('not this one')"
PROBLEMS = {
    LOOP: ("timeout", "took longer than reward.timeout_s=2.0"),
    "do os._exit(3)": ("died", "ended its process: exit status 3"),
    RAISE: ("raised", "ValueError: not this one"),
    "do ctypes.PyDLL(None).sleep(1000)  # in C, holding the GIL": ("timeout", "took longer than reward.timeout_s=2.0"),
    "do ctypes.string_at(0)": ("died", "ended its process: killed by SIGSEGV"),
    "do kept = []\nwhile True: kept.append(bytes(10**8))": ("memory", "MemoryError"),
    "do sys.exit(1)": ("raised", "SystemExit: 1"),
    "do os.kill(os.getpid(), 35)  # a signal without a name": ("died", "ended its process: killed by signal 35"),
}


def of_texts(*texts):
    return samples(texts, {"x": 1})


def test_failing_samples_are_reported_and_the_others_keep_their_scores(runner):
    fine = ["a" * (1 + number % 7) for number in range(20)]
    texts = [*fine[:5], *PROBLEMS, *fine[5:], *list(PROBLEMS)[:3]]
    outcomes = runner(num_processes=3, timeout_s=2.0).run(of_texts(*texts))
    for text, outcome in zip(texts, outcomes, strict=True):
        kind, problem = PROBLEMS.get(text, (None, ""))
        assert outcome.kind == kind, (text, outcome)
        if kind:
            assert problem in outcome.problem
        else:
            assert (outcome.result["score"], outcome.result["answer"]) == (len(text), text)
            assert repr(outcome.result["object"]).startswith("<object object")


def test_progress_counts_the_scored_responses(runner):
    given, before = of_texts("a", RAISE, "c"), progress()
    runner().run(given)
    assert progress() - before == 3
    call_here(lambda **sample: 1.0, [sample for _, sample in given], {})
    assert progress() - before == 6


def test_an_async_function_runs_here_beside_a_running_event_loop():
    async def score(solution_str, **_):
        await asyncio.sleep(0)
        return float(len(solution_str))

    async def cell_of_a_notebook():
        return call_here(score, [sample for _, sample in of_texts("a", "bc")], {})

    assert [outcome.result for outcome in asyncio.run(cell_of_a_notebook())] == [1.0, 2.0]


def test_exceptions_and_hangs_do_not_affect_the_other_process(runner):
    scores, known = runner(num_processes=2, timeout_s=2.0), []
    outcomes = scores.run(of_texts(*["fine", RAISE, "fine"] * 40))
    assert [outcome.kind for outcome in outcomes] == [None, "raised", None] * 40
    assert 1 <= len({outcome.result["process"] for outcome in outcomes if outcome.kind is None}) <= 2
    outcomes = scores.wait(scores.submit(of_texts(LOOP, *["fine"] * 50), lambda number, outcome: known.append(number)))
    assert [outcome.kind for outcome in outcomes] == ["timeout", *[None] * 50]
    assert known.index(0) >= 49  # at most the sample that the process already had before it hung comes later


@pytest.mark.parametrize("first_waited_for", [0, 1])
def test_samples_submitted_later_run_beside_earlier_ones(runner, tmp_path, first_waited_for):
    (tmp_path / "calls").mkdir()
    at_once = runner("at_once", timeout_s=None)
    submitted = [at_once.submit(of_texts(f"{tmp_path}/calls/{number}")) for number in range(2)]
    outcomes = {number: at_once.wait(submitted[number]) for number in (first_waited_for, 1 - first_waited_for)}
    assert [outcomes[number][0].result for number in range(2)] == [0.0, 1.0]


def test_an_error_while_waiting_leaves_the_samples_of_other_calls(runner):
    def fail(number, outcome):
        raise OSError("the disk is full")

    scores = runner()
    before, failing, after = (
        scores.submit(of_texts(*["a"] * 3)),
        scores.submit(of_texts(*["bb"] * 3), fail),
        scores.submit(of_texts(*["ccc"] * 3)),
    )
    with pytest.raises(OSError, match="the disk is full"):
        scores.wait(failing)
    for submitted, score in ((after, 3), (before, 1)):
        assert [outcome.result["score"] for outcome in scores.wait(submitted)] == [score] * 3


def test_each_sample_has_the_whole_time_limit(runner, monkeypatch):
    limits = []
    set_time_limit = UserProcess.set_time_limit

    def record(process, seconds, problem=""):
        limits.append((seconds, len(process.calls)))
        set_time_limit(process, seconds, problem)

    monkeypatch.setattr(UserProcess, "set_time_limit", record)
    outcomes = runner(timeout_s=300.0).run(of_texts("a", "bb", "ccc"))
    assert [outcome.kind for outcome in outcomes] == [None] * 3
    # The start; then each sample as it becomes the current one, when the process has another or none beside it.
    assert limits == [(300.0, 0), (None, 0), (300.0, 1), (300.0, 1), (300.0, 1), (None, 0)]


def test_a_sample_that_cannot_be_sent_is_an_error_of_its_call(runner):
    scores = runner()
    with pytest.raises(Exception, match="pickle"):
        scores.run(samples(["a", "bb"], {"function": lambda: 1}))
    assert [outcome.result["score"] for outcome in scores.run(of_texts("a", "bb"))] == [1, 2]


def test_an_interrupt_frees_the_processes_for_other_samples(runner):
    scores = runner(timeout_s=None)
    scores.start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            scores.run(of_texts(LOOP, LOOP, LOOP))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [outcome.result["score"] for outcome in scores.run(of_texts("a", "bb"))] == [1, 2]


def test_closing_a_runner_ends_the_wait_of_another_thread(runner):
    scores = runner(timeout_s=None)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(scores.run, of_texts(LOOP, LOOP, LOOP))
        while not scores._serving or not scores._serving[0].calls:
            time.sleep(0.01)
        scores.close()
        with pytest.raises(RewardError, match=r"were closed; make another RewardRunner"):
            waits.result()
    with pytest.raises(RewardError, match=r"were closed; make another RewardRunner"):
        scores.run(of_texts("a"))


def test_processes_end_with_a_runner_that_nothing_refers_to(file):
    scores = RewardRunner(f"{file}:score", num_processes=1, timeout_s=None, memory_bytes=0)
    scores.start()
    scores.submit(of_texts(LOOP, "a"))
    (process,), thread = scores._processes, scores._thread
    del scores
    gc.collect()
    thread.join(60)  # the loop itself may have had the last reference
    assert process.popen.poll() is not None
    assert not thread.is_alive()


def test_a_program_that_ends_with_samples_in_progress_leaves_no_process(file):
    program = f"""
from hybridflow.environments.rewards import RewardRunner
runner = RewardRunner({f"{file}:score"!r}, num_processes=1, timeout_s=None, memory_bytes=0)
runner.start()
runner.submit([(0, dict(data_source="", solution_str={LOOP!r}, ground_truth=None, extra_info=None))])
print(runner._processes[0].popen.pid)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


@pytest.mark.exhaustive
def test_a_hanging_function_that_stops_reading_times_out(runner):
    texts = [LOOP, *["x" * 3_000_000] * 4]  # more than a pipe takes
    outcomes = runner(timeout_s=2.0).run(of_texts(*texts))
    assert [outcome.kind for outcome in outcomes] == ["timeout", None, None, None, None]


def test_random_numbers_depend_on_the_seed_of_the_sample_only(runner):
    one, three = runner("noisy"), runner("noisy", num_processes=3)
    wanted = of_texts(*["x"] * 40)
    first = [outcome.result for outcome in one.run(wanted)]
    assert [outcome.result for outcome in three.run(wanted)] == first
    assert [outcome.result for outcome in one.run(wanted[::-1])] == first[::-1]
    assert len(set(first)) == 40


def test_a_process_killed_between_calls_is_replaced_silently(runner):
    idle = runner()
    (before,) = idle.run(of_texts("x"))
    supervisor = idle._processes[0].popen.pid
    os.kill(before.result["process"], signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the pool may have seen it before
        os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOWAIT)
    (after,) = idle.run(of_texts("x"))
    assert after.kind is None
    assert after.result["process"] != before.result["process"]


@pytest.mark.parametrize("function", ["killed_once_async", pytest.param("killed_once", marks=pytest.mark.exhaustive)])
def test_the_sample_of_a_process_that_was_killed_is_scored_again(runner, tmp_path, function):
    """As by the kernel when memory runs out: the results are those of an undisturbed call."""
    victim = runner(function, kwargs={"directory": str(tmp_path / "pids")})
    (tmp_path / "pids").mkdir()

    def kill_first():
        while not (pids := list((tmp_path / "pids").iterdir())):
            time.sleep(0.01)
        os.kill(int(pids[0].name), signal.SIGKILL)

    thread = threading.Thread(target=kill_first)
    thread.start()
    outcomes = victim.run(of_texts("a", "bb", "ccc"))
    thread.join()
    assert [(outcome.kind, outcome.result) for outcome in outcomes] == [(None, 1.0), (None, 2.0), (None, 3.0)]
    assert len(list((tmp_path / "pids").iterdir())) >= 2


def test_a_process_that_was_killed_while_it_started_is_started_again(runner, file, tmp_path):
    (tmp_path / "kill").touch()
    file.write_text(
        f"import os, pathlib\nfile = pathlib.Path({str(tmp_path / 'kill')!r})\n"
        "if file.exists():\n    file.unlink()\n    os.kill(os.getpid(), 9)\n"
        "def score(**sample):\n    return 2.0\n"
    )
    (outcome,) = runner().run(of_texts("a"))
    assert (outcome.kind, outcome.result) == (None, 2.0)


def test_processes_close_with_the_runner_and_are_at_most_the_samples(runner):
    few = runner(num_processes=5)
    pids = {outcome.result["process"] for outcome in few.run(of_texts("x", "y"))}
    assert len(pids) <= 2
    assert few.run([]) == []
    few.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def score_all(scorer, *texts):
    return scorer.score(texts, ["d"] * len(texts), [{"x": 1}] * len(texts), None, ["a prompt"] * len(texts))


def test_a_scorer_shows_a_failed_sample_or_scores_it_up_to_a_rate(runner):
    scores = runner(timeout_s=2.0)
    with pytest.raises(RewardError, match=r"(?s)reward function score took longer .*solution: 'do while"):
        score_all(RewardScorer(runner=scores), "ab", LOOP, "c")
    result = score_all(RewardScorer(runner=scores, on_error="zero", error_score=-1.0), "ab", LOOP, RAISE, "c")
    assert result.scores.tolist() == [2.0, -1.0, -1.0, 1.0]
    assert result.failed.tolist() == [False, True, True, False]
    assert result.timed_out.tolist() == [False, True, False, False]
    assert result.answers == ["ab", None, None, "c"]
    scorer = RewardScorer(runner=scores, on_error="zero", max_failure_rate=0.3)
    assert score_all(scorer, RAISE, *["ab"] * 3).num_errors == 1
    wanted = r"(?s)2 of 4 rewards failed, more than reward.max_failure_rate=0.3.*not this one"
    with pytest.raises(RewardError, match=wanted):
        score_all(scorer, RAISE, RAISE, "ab", "ab")


def test_a_function_that_prints_to_a_closed_pipe_keeps_its_score(runner):
    read_end, write_end = os.pipe()
    kept = os.dup(2)
    os.close(read_end)
    os.dup2(write_end, 2)
    try:
        outcomes = runner().run(of_texts("do print('x' * 10**5, flush=True)"))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(write_end)
    assert [outcome.problem for outcome in outcomes] == [""]
