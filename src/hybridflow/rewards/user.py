"""Loads a reward function of the user's own, and looks whether it can be called as one."""

from hybridflow.errors import RewardError
from hybridflow.rewards.reward_process import ARGUMENTS, WHAT
from hybridflow.rewards.table import RewardFunction
from hybridflow.runtime import load_user_function, require_arguments


def load_reward_function(name: str) -> RewardFunction:
    """The function that 'path/to/file.py:function' or 'package.module:function' names.

    Raises `RewardError` if there is no such file, module or function, if the code fails on import, or if the function
    cannot be called with the keyword arguments data_source, solution_str, ground_truth, extra_info.
    """
    function: RewardFunction = load_user_function(name, WHAT, RewardError)
    check_signature(function, name)
    return function


def check_signature(function: RewardFunction, name: str) -> None:
    """`RewardError` if the function cannot take the four keyword arguments."""
    require_arguments(function, name, WHAT, ARGUMENTS, RewardError)
