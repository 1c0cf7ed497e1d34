"""The error of a failed reward function names the file, the line and the source line of the user's code."""

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import RewardRunner, RewardScorer, multiplication_reward

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

class Mute(Exception):
    def __str__(self):
        raise ValueError

def mute(**sample):
    raise Mute

async def async_mute(**sample):
    raise Mute
"""
LINE = next(number for number, line in enumerate(FUNCTIONS.splitlines(), 1) if "# THE LINE" in line)
WRONG_CALL = FUNCTIONS.splitlines().index("def wrong_call(**sample):") + 2

FORMS = ["plain", "waiting", "batch", "async_batch", "wrapped", "instance", "partial"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def in_process(file):
    def build(function):
        built.append(RewardRunner(f"{file}:{function}", num_processes=1, timeout_s=100.0, memory_bytes=0))
        return RewardScorer(runner=built[-1])

    built: list[RewardRunner] = []
    yield build
    for runner in built:
        runner.close()


def error_of(scorer: RewardScorer) -> str:
    with pytest.raises(RewardError) as error:
        scorer.score(["1", "{"], ["d", "d"], [None, None])
    return str(error.value)


@pytest.mark.parametrize("function", FORMS)
def test_error_names_the_line_of_the_users_file(file, in_process, function):
    wanted = f" at {file}:{LINE}, in parse: `return json.loads(text)  # THE LINE`. The sample:"
    for scorer in (RewardScorer(f"{file}:{function}"), in_process(function)):
        message = error_of(scorer)
        assert "raised JSONDecodeError: Expecting property name" in message
        assert wanted in message


def test_error_names_the_line_of_a_wrong_call(file, in_process):
    for scorer in (RewardScorer(f"{file}:wrong_call"), in_process("wrong_call")):
        message = error_of(scorer)
        assert "raised TypeError: parse() missing 1 required positional argument: 'text'" in message
        assert f"at {file}:{WRONG_CALL}, in wrong_call: `return parse()`" in message


@pytest.mark.parametrize("function", ["mute", "async_mute"])
def test_error_of_an_exception_without_text_names_its_type_and_line(file, in_process, function):
    for scorer in (RewardScorer(f"{file}:{function}"), in_process(function)):
        assert f"raised Mute: (its text is missing: __str__ raised ValueError) at {file}:" in error_of(scorer)


def test_error_of_a_built_in_function_has_no_line():
    with pytest.raises(RewardError, match=r"the ground truth must .*[^`]\. The sample:") as error:
        RewardScorer(multiplication_reward).score(["1"], ["multiplication"], [None])
    assert ".py:" not in str(error.value)
