import sys

import pytest

from hybridflow.environments.rewards import load_reward_function
from hybridflow.errors import RewardError

FUNCTIONS = """
import dataclasses

@dataclasses.dataclass
class Weights:
    length: float = 0.5

def by_length(data_source, solution_str, ground_truth, extra_info):
    return Weights().length * len(solution_str)

def too_few(solution_str, ground_truth):
    return 0.0

def misspelled(data_source, solution, ground_truth, extra_infos=None):
    return 0.0
"""


def call(function, solution: str = "abcd"):
    return function(data_source="x", solution_str=solution, ground_truth="1", extra_info={})


def test_a_function_of_a_file_or_a_module_is_loaded(file, monkeypatch):
    assert call(load_reward_function(f"{file}:by_length")) == 2.0
    monkeypatch.chdir(file.parent)
    assert call(load_reward_function("mine.py:by_length"), "ab") == 1.0
    assert call(load_reward_function("hybridflow.environments.rewards:gsm8k_flexible_reward"), "1") == 1.0


def test_files_with_equal_names_are_separate_modules(tmp_path):
    functions = []
    for folder, value in (("one", 1.0), ("two", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "json.py").write_text(f"def reward(**row):\n    return {value}\n")
        functions.append(load_reward_function(f"{tmp_path / folder / 'json.py'}:reward"))
    assert [call(function) for function in functions] == [1.0, 2.0]
    assert sys.modules["json"].__name__ == "json"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_reward", "write 'path.py:function' or 'module:function'"),
        (":f", "write 'path.py:function'"),
        ("a.py:", "write 'path.py:function'"),
        ("nowhere.py:f", "there is no file"),
        ("no_such_module_here:f", "importing no_such_module_here failed: ModuleNotFoundError"),
        ("{file}:absent", "has no function 'absent'; it has by_length, too_few, misspelled"),
        ("{file}:too_few", "is too_few(solution_str, ground_truth), but it is called with the keyword arguments"),
        (
            "{file}:misspelled",
            "(did you mean 'solution_str' instead of 'solution', 'extra_info' instead of 'extra_infos'?), but it is",
        ),
    ],
)
def test_a_function_that_cannot_be_loaded_is_rejected_with_the_fix(file, name, message):
    with pytest.raises(RewardError) as error:
        load_reward_function(name.format(file=file))
    assert message in str(error.value)
