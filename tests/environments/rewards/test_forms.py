"""Reward functions that are async, take batches or have further arguments: in processes and in the rank."""

import pytest

from fixtures.reward_samples import samples
from hybridflow.environments.processes import reward_runner as runner_module
from hybridflow.environments.rewards import RewardScorer
from hybridflow.errors import RewardError

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: its reward function is plain")]

FUNCTIONS = """
import asyncio, functools, os, random, subprocess, time

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
    if solution_str.startswith("do "):
        exec(solution_str.removeprefix("do "), globals())
    if solution_str == "late":
        await asyncio.sleep(60)
    if solution_str == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    await asyncio.sleep(seconds)
    return {"score": len(solution_str), "seconds": seconds}

def batch(data_sources, solution_strs, ground_truths, extra_infos, factor=1):
    for text in solution_strs:
        if text.startswith("do "):
            exec(text.removeprefix("do "))
    if "short" in solution_strs:
        return [1.0]
    longest = max(map(len, solution_strs))
    return [{"score": factor * len(text) / longest, "drawn": random.random()} for text in solution_strs]

async def async_batch(data_sources, solution_strs, ground_truths, extra_infos):
    await asyncio.sleep(0.01)
    return tuple(len(text) for text in solution_strs)

def scaled(data_source, solution_str, ground_truth, extra_info, factor, offset=0):
    return factor * len(solution_str) + offset

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

@functools.wraps(patient.__call__)
def wrapped(**sample):
    return patient(**sample)

def forks(data_source, solution_str, ground_truth, extra_info):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    return len(solution_str)
"""


RAISE = "do raise ValueError('no')"


def scores(outcomes):
    return [outcome.result["score"] for outcome in outcomes]


def test_an_async_function_runs_as_many_samples_as_allowed_in_order(runner):
    texts = ["a" * (1 + number % 9) for number in range(60)]
    for concurrency in (32, 2):
        outcomes = runner("counted", concurrency=concurrency, kwargs={"wanted": concurrency}).run(samples(texts))
        assert scores(outcomes) == [len(text) for text in texts]
        assert max(outcome.result["in_hand"] for outcome in outcomes) == concurrency
        texts = texts[:6]


def test_a_failure_of_an_async_function_affects_one_sample(runner):
    texts = ["a", RAISE, "late", "b", "do raise TimeoutError('raised by the function')", "c"]
    outcomes = runner("slow", timeout_s=1.0, kwargs={"seconds": 0.0}).run(samples(texts))
    assert [outcome.kind for outcome in outcomes] == [None, "raised", "timeout", None, "raised", None]
    assert outcomes[1].problem.startswith("ValueError: no at ")
    assert outcomes[2].problem == "took longer than reward.timeout_s=1.0"
    assert outcomes[4].problem.startswith("TimeoutError: raised by the function at ")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("bad", "kind"), [("do time.sleep(60)", "timeout"), ("stubborn", "timeout"), ("do os._exit(3)", "died")]
)
def test_a_sample_that_ends_its_process_fails_alone(runner, monkeypatch, bad, kind):
    monkeypatch.setattr(runner_module, "GRACE_S", 0.5)
    texts = ["a", "bb", bad, "ccc", "dddd"] * 2
    outcomes = runner("slow", timeout_s=1.0, kwargs={"seconds": 0.1}).run(samples(texts))
    assert [outcome.kind for outcome in outcomes] == [None, None, kind, None, None] * 2
    assert [outcome.result["score"] for outcome in outcomes if outcome.kind is None] == [1, 2, 3, 4] * 2


def test_a_batch_function_gets_all_samples_of_a_call(runner):
    one, two = runner("batch"), runner("batch", num_processes=2, kwargs={"factor": 10})
    assert scores(one.run(samples(["a", "bbbb", "cc"]))) == [0.25, 1.0, 0.5]
    assert scores(two.run(samples(["a", "bbbb", "cc"]))) == [2.5, 10.0, 5.0]
    drawn = [[outcome.result["drawn"] for outcome in r.run(samples(["a", "b"]))] for r in (one, two)]
    assert drawn[0] == drawn[1]  # by the seeds of the samples
    assert [outcome.kind for outcome in one.run(samples(["a", RAISE]))] == ["raised", "raised"]
    (first, _) = one.run(samples(["a", "short"]))
    assert "must return a list of 2 results, one for each sample, not 1 results" in first.problem


def test_missing_kwargs_are_rejected_at_the_start(runner):
    for kwargs, problem in (({}, "missing a required argument: 'factor'"), ({"factor": 1, "x": 2}, "unexpected")):
        with pytest.raises(RewardError, match=problem):
            runner("scaled", kwargs=kwargs).start()


@pytest.mark.parametrize(
    ("function", "kwargs", "wanted"),
    [
        ("slow", {"seconds": 0.0}, [1.0, 4.0]),
        ("batch", {"factor": 2}, [0.5, 2.0]),
        ("async_batch", {}, [1.0, 4.0]),
        ("scaled", {"factor": 3, "offset": 1}, [4.0, 13.0]),
        ("patient", {}, [1.0, 4.0]),
        ("wrapped", {}, [1.0, 4.0]),
        ("forks", {}, [1.0, 4.0]),
    ],
)
def test_every_form_is_called_in_the_rank_and_in_processes(runner, file, function, kwargs, wanted):
    for scorer in (
        RewardScorer(f"{file}:{function}", kwargs=kwargs),
        RewardScorer(runner=runner(function, kwargs=kwargs)),
    ):
        assert scorer.score(["a", "bbbb"], ["d", "d"], [None, None]).scores.tolist() == wanted


def test_failures_in_the_rank_affect_a_sample_or_the_batch(file):
    rows = {"solution_texts": ["a", RAISE], "data_sources": ["d", "d"], "ground_truths": [None, None]}
    zero = {"on_error": "zero", "max_failure_rate": 1.0}
    assert RewardScorer(f"{file}:slow", **zero).score(**rows).failed.tolist() == [False, True]
    assert RewardScorer(f"{file}:batch", **zero).score(**rows).failed.tolist() == [True, True]


def test_a_function_cannot_read_samples_from_stdin(runner):
    outcomes = runner("reads").run(samples(["input", "child", "abc"]))
    assert [outcome.kind for outcome in outcomes] == ["raised", None, None]
    assert [outcome.result for outcome in outcomes] == [None, 0, 3]


def test_exit_is_detected_while_a_child_holds_the_connection(runner):
    outcomes = runner("reads", timeout_s=None).run(samples(["behind", "a"]))
    assert [outcome.kind for outcome in outcomes] == ["died", None]
