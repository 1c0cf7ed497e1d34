"""Reward functions that are async, take batches or have further arguments: in processes and in the rank."""

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import RewardRunner, RewardScorer
from hybridflow.rewards import runner as runner_module

FUNCTIONS = """
import asyncio, os, random, time

in_hand, most, is_full = 0, 0, asyncio.Event()

async def counted(wanted, **sample):
    global in_hand, most
    in_hand += 1
    most = max(most, in_hand)
    if in_hand == wanted:
        is_full.set()
    await is_full.wait()
    await asyncio.sleep(0.1)  # a sample beyond the limit would arrive
    in_hand -= 1
    return {"score": len(sample["solution_str"]), "in_hand": most}

async def slow(data_source, solution_str, ground_truth, extra_info, seconds=0.3):
    if solution_str == "raise":
        raise ValueError("no")
    if solution_str == "late":
        await asyncio.sleep(60)
    if solution_str == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if solution_str == "block":
        time.sleep(60)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "own":
        raise TimeoutError("raised by the function")
    await asyncio.sleep(seconds)
    return {"score": len(solution_str), "seconds": seconds}

def batch(data_sources, solution_strs, ground_truths, extra_infos, factor=1):
    if "raise" in solution_strs:
        raise ValueError("no")
    if "short" in solution_strs:
        return [1.0]
    longest = max(map(len, solution_strs))
    return [{"score": factor * len(text) / longest, "drawn": random.random()} for text in solution_strs]

async def async_batch(data_sources, solution_strs, ground_truths, extra_infos):
    await asyncio.sleep(0.01)
    return tuple(len(text) for text in solution_strs)

def scaled(data_source, solution_str, ground_truth, extra_info, factor, offset=0):
    return factor * len(solution_str) + offset

def lists(**sample):
    return [1, 2]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def runner(file):
    def build(function, **changes):
        settings = {"num_processes": 2, "timeout_s": 100.0, "memory_bytes": 2**29} | changes
        built.append(RewardRunner(f"{file}:{function}", **settings))
        return built[-1]

    built: list[RewardRunner] = []
    yield build
    for each in built:
        each.close()


def samples(texts):
    return [
        (seed, {"data_source": "d", "solution_str": text, "ground_truth": None, "extra_info": {}})
        for seed, text in enumerate(texts)
    ]


def scores(outcomes):
    return [outcome.result["score"] for outcome in outcomes]


def test_an_async_function_runs_many_samples_and_keeps_their_order(runner):
    texts = ["a" * (1 + i % 9) for i in range(60)]
    outcomes = runner("counted", num_processes=1, kwargs={"wanted": 32}).run(samples(texts))
    assert scores(outcomes) == [len(text) for text in texts]
    assert max(outcome.result["in_hand"] for outcome in outcomes) == 32


def test_concurrency_limits_the_samples_of_an_async_function(runner):
    outcomes = runner("counted", concurrency=2, num_processes=1, kwargs={"wanted": 2}).run(samples(["a"] * 6))
    assert max(outcome.result["in_hand"] for outcome in outcomes) == 2


def test_a_failure_of_an_async_function_affects_one_sample(runner):
    texts = ["a", "raise", "late", "b", "own", "c"]
    outcomes = runner("slow", timeout_s=1.0, kwargs={"seconds": 0.0}).run(samples(texts))
    assert [outcome.kind for outcome in outcomes] == [None, "raised", "timeout", None, "raised", None]
    assert outcomes[1].problem.startswith("ValueError: no at ")
    assert outcomes[2].problem == "took longer than reward.timeout_s=1.0"
    assert outcomes[4].problem.startswith("TimeoutError: raised by the function at ")


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "kind"), [("block", "timeout"), ("stubborn", "timeout"), ("exit", "died")])
def test_a_sample_that_ends_its_process_fails_alone(runner, monkeypatch, bad, kind):
    monkeypatch.setattr(runner_module, "GRACE_S", 0.5)
    texts = ["a", "bb", bad, "ccc", "dddd"] * 2
    outcomes = runner("slow", timeout_s=1.0, num_processes=1, kwargs={"seconds": 0.1}).run(samples(texts))
    assert [outcome.kind for outcome in outcomes] == [None, None, kind, None, None] * 2
    assert [outcome.result["score"] for outcome in outcomes if outcome.kind is None] == [1, 2, 3, 4] * 2


def test_a_batch_function_gets_all_samples_of_a_call(runner):
    one, two = runner("batch", num_processes=1), runner("batch", kwargs={"factor": 10})
    assert scores(one.run(samples(["a", "bbbb", "cc"]))) == [0.25, 1.0, 0.5]
    assert scores(two.run(samples(["a", "bbbb", "cc"]))) == [2.5, 10.0, 5.0]
    drawn = [[outcome.result["drawn"] for outcome in r.run(samples(["a", "b"]))] for r in (one, two)]
    assert drawn[0] == drawn[1]  # by the seeds of the samples


def test_a_failed_batch_fails_all_its_samples(runner):
    asked = runner("batch")
    assert [outcome.kind for outcome in asked.run(samples(["a", "raise"]))] == ["raised", "raised"]
    (first, _) = asked.run(samples(["a", "short"]))
    assert "must return a list of 2 results, one for each sample, not 1 results" in first.problem


def test_an_async_function_may_take_batches(runner):
    assert [outcome.result for outcome in runner("async_batch").run(samples(["a", "bb"]))] == [1.0, 2.0]


def test_a_list_for_one_sample_is_not_a_score(runner):
    scorer = RewardScorer(runner=runner("lists"))
    with pytest.raises(RewardError, match=r"returned \[1, 2\], which is not a finite number"):
        scorer.score(["x"], ["d"], [None])


def test_kwargs_are_passed_and_missing_ones_are_rejected_at_the_start(runner, file):
    outcomes = runner("scaled", kwargs={"factor": 3, "offset": 1}).run(samples(["aa"]))
    assert outcomes[0].result == 7.0
    for kwargs, problem in (({}, "missing a required argument: 'factor'"), ({"factor": 1, "x": 2}, "unexpected")):
        with pytest.raises(RewardError, match=problem):
            runner("scaled", kwargs=kwargs).start()
        with pytest.raises(RewardError, match=problem):
            RewardScorer(f"{file}:scaled", kwargs=kwargs)


@pytest.mark.parametrize(
    ("function", "kwargs", "wanted"),
    [
        ("slow", {"seconds": 0.0}, [1.0, 4.0]),
        ("batch", {"factor": 2}, [0.5, 2.0]),
        ("async_batch", {}, [1.0, 4.0]),
        ("scaled", {"factor": 2}, [2.0, 8.0]),
    ],
)
def test_every_form_can_be_called_in_the_rank(file, function, kwargs, wanted):
    scorer = RewardScorer(f"{file}:{function}", kwargs=kwargs)
    assert scorer.score(["a", "bbbb"], ["d", "d"], [None, None]).scores.tolist() == wanted


def test_failures_in_the_rank_affect_a_sample_or_the_batch(file):
    rows = {"solution_texts": ["a", "raise"], "data_sources": ["d", "d"], "ground_truths": [None, None]}
    zero = {"on_error": "zero", "max_failure_rate": 1.0}
    assert RewardScorer(f"{file}:slow", **zero).score(**rows).failed.tolist() == [False, True]
    assert RewardScorer(f"{file}:batch", **zero).score(**rows).failed.tolist() == [True, True]


ODD = """
import functools, os, subprocess, sys, time

def reads(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "input":
        return input()
    if solution_str == "child":
        return len(subprocess.run(["cat"], capture_output=True).stdout)
    if solution_str == "behind":
        if os.fork() == 0:
            time.sleep(1000)
            os._exit(0)
        os._exit(1)
    return len(solution_str)

class Patient:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return len(solution_str)

patient = Patient()

async def plain(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

@functools.wraps(plain)
def wrapped(**sample):
    return plain(**sample)

def voted(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1, "answer": 10**20 + 1 if solution_str == "big" else 7}
"""


@pytest.fixture
def odd(tmp_path, runner, file):
    file.write_text(ODD)
    return runner


def test_a_function_cannot_read_samples_from_stdin(odd):
    outcomes = odd("reads", num_processes=1).run(samples(["input", "child", "abc"]))
    assert [outcome.kind for outcome in outcomes] == ["raised", None, None]
    assert [outcome.result for outcome in outcomes] == [None, 0, 3]


@pytest.mark.timeout(120)
def test_exit_is_detected_while_a_child_holds_the_connection(odd):
    outcomes = odd("reads", timeout_s=None, num_processes=1).run(samples(["behind", "a"]))
    assert [outcome.kind for outcome in outcomes] == ["died", None]


@pytest.mark.parametrize("function", ["patient", "wrapped"])
def test_async_objects_and_wrapped_async_functions_are_awaited(odd, file, function):
    assert [outcome.result for outcome in odd(function).run(samples(["a", "bb"]))] == [1, 2]
    assert RewardScorer(f"{file}:{function}").score(["a"], ["d"], [None]).scores.tolist() == [1.0]


def test_large_integers_are_kept_exactly_as_answers(odd):
    answers = [outcome.result["answer"] for outcome in odd("voted").run(samples(["big", "a"]))]
    assert answers == [10**20 + 1, 7]


def test_a_forked_child_of_a_function_in_the_rank_does_not_go_on(tmp_path):
    file = tmp_path / "forks.py"
    file.write_text("""
import os

def score(data_source, solution_str, ground_truth, extra_info):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    return len(solution_str)
""")
    assert RewardScorer(f"{file}:score").score(["a", "bb"], ["d", "d"], [None, None]).scores.tolist() == [1.0, 2.0]
