"""The error of a failed reward function names the file, the line and the source line of the user's code."""

import pytest

from hybridflow.environments.rewards import RewardScorer, multiplication_reward
from hybridflow.errors import RewardError

FUNCTIONS = """
import asyncio, functools, json

def parse(text):
    return json.loads(text)  # THE LINE

def plain(data_source, solution_str, ground_truth, extra_info):
    return parse(solution_str)

async def waiting(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return parse(solution_str)

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [parse(text) for text in solution_strs]

async def async_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [parse(text) for text in solution_strs]

@functools.wraps(plain)
def wrapped(**sample):
    return plain(**sample)

class Scorer:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return parse(solution_str)

instance = Scorer()
partial = functools.partial(plain)

def wrong_call(**sample):
    return parse()
"""
LINE = next(number for number, line in enumerate(FUNCTIONS.splitlines(), 1) if "# THE LINE" in line)
WRONG_CALL = FUNCTIONS.splitlines().index("def wrong_call(**sample):") + 2

FORMS = ["plain", "waiting", "batch", "async_batch", "wrapped", "instance", "partial", "wrong_call"]


in_processes = [pytest.mark.runs, pytest.mark.own_run("grpo: its reward function does not fail")]


@pytest.mark.parametrize("place", ["rank", pytest.param("process", marks=in_processes)])
@pytest.mark.parametrize("function", FORMS)
def test_error_names_the_line_of_the_users_file(file, runner, function, place):
    scorer = RewardScorer(f"{file}:{function}") if place == "rank" else RewardScorer(runner=runner(function))
    with pytest.raises(RewardError) as error:
        scorer.score(["1", "{"], ["d", "d"], [None, None])
    message = str(error.value)
    if function == "wrong_call":
        assert "raised TypeError: parse() missing 1 required positional argument: 'text'" in message
        assert f"at {file}:{WRONG_CALL}, in wrong_call: `return parse()`" in message
    else:
        assert "raised JSONDecodeError: Expecting property name" in message
        assert f" at {file}:{LINE}, in parse: `return json.loads(text)  # THE LINE`. The sample:" in message


def test_error_of_a_built_in_function_has_no_line():
    with pytest.raises(RewardError, match=r"the ground truth must .*[^`]\. The sample:") as error:
        RewardScorer(multiplication_reward).score(["1"], ["multiplication"], [None])
    assert ".py:" not in str(error.value)
