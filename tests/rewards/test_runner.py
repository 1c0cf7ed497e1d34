"""Failing reward functions in separate processes: the other samples keep their scores."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import RewardRunner, RewardScorer
from hybridflow.rewards import runner as runner_module
from hybridflow.rewards.in_rank import call_here
from hybridflow.runtime import progress

FUNCTIONS = """
import asyncio, ctypes, os, random, sys, time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "loop":
        while True:
            pass
    if solution_str == "lock":
        ctypes.PyDLL(None).sleep(1000)  # in C, holding the GIL
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "abort":
        ctypes.string_at(0)
    if solution_str == "allocate":
        kept = []
        while True:
            kept.append(bytes(10**8))  # not touched, so that it takes no time
    if solution_str == "raise":
        raise ValueError("not this one")
    if solution_str == "sysexit":
        sys.exit(1)
    print("a function may print")
    ground_truth["changed"] = True
    return {"score": len(solution_str), "answer": solution_str, "object": object()}

def noisy(**sample):
    return random.random()

def environment(**sample):
    import os
    return {"score": os.getpid()}

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

def killed_once_batch(data_sources, solution_strs, ground_truths, extra_infos, directory):
    while waits_once(directory):
        time.sleep(0.01)
    return [len(text) for text in solution_strs]

def located(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise ValueError("not this one")
    if solution_str == "loop":
        while True:
            pass
    return os.getpid()

def together(data_source, solution_str, ground_truth, extra_info):
    open(os.path.join(solution_str, str(os.getpid())), "w").close()
    while len(os.listdir(solution_str)) < 2:
        time.sleep(0.01)
    return 1.0

async def at_once(data_source, solution_str, ground_truth, extra_info):
    import asyncio
    directory, number = os.path.split(solution_str)
    open(solution_str, "w").close()
    while len(os.listdir(directory)) < 2:
        await asyncio.sleep(0.01)
    return float(number)

def two(only, these):
    return 0.0
"""

PROBLEMS = {
    "loop": ("timeout", "took longer than reward.timeout_s=2.0"),
    "lock": ("timeout", "took longer than reward.timeout_s=2.0"),
    "exit": ("died", "ended its process: exit status 3"),
    "abort": ("died", "ended its process: killed by SIGSEGV"),
    "allocate": ("memory", "MemoryError"),
    "raise": ("raised", "ValueError: not this one"),
    "sysexit": ("raised", "SystemExit: 1"),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def runner(file):
    def build(function="score", **changes):
        settings = {"num_processes": 2, "timeout_s": 100.0, "memory_bytes": 2**29} | changes
        built.append(RewardRunner(f"{file}:{function}", **settings))
        return built[-1]

    built: list[RewardRunner] = []
    yield build
    for each in built:
        each.close()


def samples(texts):
    return [
        (seed, {"data_source": "d", "solution_str": text, "ground_truth": {"x": 1}, "extra_info": {}})
        for seed, text in enumerate(texts)
    ]


@pytest.mark.parametrize("bad", PROBLEMS)
def test_a_failing_sample_is_reported_and_the_others_keep_their_scores(runner, bad):
    texts = ["a" * (1 + i % 7) for i in range(60)]
    texts[5] = texts[33] = bad
    kind, problem = PROBLEMS[bad]
    outcomes = runner(timeout_s=2.0 if kind == "timeout" else 100.0).run(samples(texts))
    for text, outcome in zip(texts, outcomes, strict=True):
        if text == bad:
            assert outcome.kind == kind
            assert problem in outcome.problem
        else:
            assert outcome.kind is None
            assert outcome.result["score"] == len(text)
            assert outcome.result["answer"] == text
            assert repr(outcome.result["object"]).startswith("<object object")


def test_progress_counts_the_scored_responses(runner):
    given, before = samples(["a", "raise", "c"]), progress()
    runner().run(given)
    assert progress() - before == 3
    call_here(lambda **sample: 1.0, [sample for _, sample in given], {})
    assert progress() - before == 6


@pytest.mark.slow
def test_all_failures_at_once(runner):
    texts = [*PROBLEMS, "fine", *PROBLEMS, "good"]
    outcomes = runner(num_processes=3, timeout_s=2.0).run(samples(texts))
    assert [outcome.kind for outcome in outcomes] == [PROBLEMS.get(text, (None,))[0] for text in texts]


def test_exceptions_do_not_replace_a_process(runner):
    texts = ["raise" if i % 100 == 50 else "fine" for i in range(400)]
    outcomes = runner("located").run(samples(texts))
    assert [outcome.kind == "raised" for outcome in outcomes] == [text == "raise" for text in texts]
    assert 1 <= len({outcome.result for outcome in outcomes if outcome.kind is None}) <= 2


def test_the_other_process_scores_while_a_sample_hangs(runner):
    located, known = runner("located", timeout_s=2.0), []
    located.run(samples(["fine"] * 100))  # both processes have started
    outcomes = located.call(samples(["loop", *["fine"] * 50]), lambda number, outcome: known.append(number))
    assert [outcome.kind for outcome in outcomes] == ["timeout", *[None] * 50]
    assert known.index(0) >= 49  # at most the sample that the process already had before it hung comes later


@pytest.mark.timeout(120)
def test_processes_run_in_parallel(runner, tmp_path):
    directory = tmp_path / "processes"
    directory.mkdir()
    outcomes = runner("together", timeout_s=None).run(samples([str(directory)] * 4))
    assert [outcome.result for outcome in outcomes] == [1.0] * 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first_waited_for", [0, 1])
def test_samples_submitted_later_run_beside_earlier_ones(runner, tmp_path, first_waited_for):
    at_once = runner("at_once", timeout_s=None, num_processes=1)
    submitted = [at_once.submit(samples([f"{tmp_path}/{number}"])) for number in range(2)]
    outcomes = {number: at_once.wait(submitted[number]) for number in (first_waited_for, 1 - first_waited_for)}
    assert [outcomes[number][0].result for number in range(2)] == [0.0, 1.0]


@pytest.mark.timeout(120)
def test_samples_submitted_while_another_thread_waits_run_at_once(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "POLL_S", 1000.0)
    directory = tmp_path / "calls"
    directory.mkdir()
    at_once = runner("at_once", timeout_s=None, num_processes=1)
    first = at_once.submit(samples([f"{directory}/0"]))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(at_once.wait, first)
        while not (directory / "0").exists():
            time.sleep(0.01)
        assert at_once.call(samples([f"{directory}/1"]))[0].result == 1.0
        assert waits.result()[0].result == 0.0


def test_an_error_while_waiting_leaves_the_samples_of_other_calls(runner):
    def fail(number, outcome):
        raise OSError("the disk is full")

    scores = runner(num_processes=1)
    before, failing, after = (
        scores.submit(samples(["a"] * 3)),
        scores.submit(samples(["bb"] * 3), fail),
        scores.submit(samples(["ccc"] * 3)),
    )
    with pytest.raises(OSError, match="the disk is full"):
        scores.wait(failing)
    for submitted, score in ((after, 3), (before, 1)):
        assert [outcome.result["score"] for outcome in scores.wait(submitted)] == [score] * 3


def test_each_sample_has_the_whole_time_limit(runner, monkeypatch):
    now = [0.0]
    located = runner("located", timeout_s=1.0, num_processes=1)
    located.start()
    monkeypatch.setattr(runner_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def spend_time(number, outcome):
        now[0] += 0.9

    outcomes = located.call(samples(["fine"] * 8), spend_time)
    assert [outcome.kind for outcome in outcomes] == [None] * 8
    assert now == [pytest.approx(7.2)]


@pytest.mark.slow
def test_a_hanging_function_that_stops_reading_times_out(runner):
    texts = ["loop", *["x" * 3_000_000] * 4]  # more than a pipe takes
    outcomes = runner(num_processes=1, timeout_s=2.0).run(samples(texts))
    assert [outcome.kind for outcome in outcomes] == ["timeout", None, None, None, None]


def test_random_numbers_depend_on_the_seed_of_the_sample_only(runner):
    one, three = runner("noisy", num_processes=1), runner("noisy", num_processes=3)
    wanted = samples(["x"] * 40)
    first = [outcome.result for outcome in one.run(wanted)]
    assert [outcome.result for outcome in three.run(wanted)] == first
    assert [outcome.result for outcome in one.run(wanted[::-1])] == first[::-1]
    assert len(set(first)) == 40


def test_a_process_killed_between_calls_is_replaced_silently(runner):
    idle = runner("environment", num_processes=1)
    (before,) = idle.run(samples(["x"]))
    pid = int(before.result["score"])
    supervisor = idle._processes[0].popen.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOWAIT)
    (after,) = idle.run(samples(["x"]))
    assert after.kind is None
    assert after.result["score"] != before.result["score"]


@pytest.mark.parametrize("function", ["killed_once", "killed_once_async", "killed_once_batch"])
def test_the_sample_of_a_process_that_was_killed_is_scored_again(runner, tmp_path, function):
    """As by the kernel when memory runs out: the results are those of an undisturbed call."""
    victim = runner(function, num_processes=1, kwargs={"directory": str(tmp_path / "pids")})
    (tmp_path / "pids").mkdir()

    def kill_first():
        while not (pids := list((tmp_path / "pids").iterdir())):
            time.sleep(0.01)
        os.kill(int(pids[0].name), signal.SIGKILL)

    thread = threading.Thread(target=kill_first)
    thread.start()
    outcomes = victim.run(samples(["a", "bb", "ccc"]))
    thread.join()
    assert [(outcome.kind, outcome.result) for outcome in outcomes] == [(None, 1.0), (None, 2.0), (None, 3.0)]
    assert len(list((tmp_path / "pids").iterdir())) >= 2


def test_a_process_that_was_killed_while_it_started_is_started_again(runner, tmp_path):
    (tmp_path / "kill").touch()
    (tmp_path / "start.py").write_text(
        f"import os, pathlib\nfile = pathlib.Path({str(tmp_path / 'kill')!r})\n"
        "if file.exists():\n    file.unlink()\n    os.kill(os.getpid(), 9)\n"
        "def score(**sample):\n    return 2.0\n"
    )
    (outcome,) = RewardRunner(f"{tmp_path}/start.py:score", num_processes=1, timeout_s=9.0, memory_bytes=0).run(
        samples(["a"])
    )
    assert (outcome.kind, outcome.result) == (None, 2.0)


def test_processes_close_with_the_runner_and_are_at_most_the_samples(runner):
    few = runner("environment", num_processes=5)
    pids = {int(outcome.result["score"]) for outcome in few.run(samples(["x", "y"]))}
    assert len(pids) <= 2
    assert few.run([]) == []
    few.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "{file}:nothing",
            "mine.py has no function 'nothing'; it has score, noisy, environment, waits_once, killed_once",
        ),
        ("{file}x.py:score", "there is no file"),
        ("no_such_module:score", "importing no_such_module failed: ModuleNotFoundError"),
        ("{file}:two", r"is two\(only, these\), but it is called with the keyword arguments data_source"),
        ("score", "write 'path.py:function' or 'module:function'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error_at_the_start(file, name, message):
    with pytest.raises(RewardError, match=message):
        RewardRunner(name.format(file=file), num_processes=2, timeout_s=100.0, memory_bytes=0).start()


def test_a_file_that_exits_on_import_is_an_error_at_the_start(tmp_path):
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    with pytest.raises(
        RewardError, match=r"the import of reward function '.*dies\.py:score' ended its process: exit status 7\."
    ):
        RewardRunner(f"{tmp_path}/dies.py:score", num_processes=1, timeout_s=100.0, memory_bytes=0).start()


def score_all(scorer, texts):
    return scorer.score(texts, ["d"] * len(texts), [{"x": 1}] * len(texts), None, ["a prompt"] * len(texts))


def test_a_scorer_shows_a_failed_sample_or_scores_it_as_configured(runner):
    with pytest.raises(RewardError, match=r"(?s)reward function score took longer .*solution: 'loop'"):
        score_all(RewardScorer(runner=runner(timeout_s=2.0)), ["ab", "loop", "c"])
    result = score_all(
        RewardScorer(runner=runner(timeout_s=2.0), on_error="zero", error_score=-1.0), ["ab", "loop", "raise", "c"]
    )
    assert result.scores.tolist() == [2.0, -1.0, -1.0, 1.0]
    assert result.failed.tolist() == [False, True, True, False]
    assert result.timed_out.tolist() == [False, True, False, False]
    assert result.answers == ["ab", None, None, "c"]


def test_more_failures_than_max_failure_rate_stop_the_run(runner):
    scorer = RewardScorer(runner=runner(), on_error="zero", max_failure_rate=0.3)
    assert score_all(scorer, ["raise", *["ab"] * 3]).num_errors == 1
    wanted = r"(?s)2 of 4 rewards failed, more than reward.max_failure_rate=0.3.*not this one"
    with pytest.raises(RewardError, match=wanted):
        score_all(scorer, ["raise", "raise", "ab", "ab"])
