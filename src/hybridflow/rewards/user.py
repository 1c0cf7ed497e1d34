"""Loading and signature check of a user's reward function."""

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import RewardConfigError
from hybridflow.rewards.arguments import checked_arguments
from hybridflow.rewards.reward_process import WHAT
from hybridflow.rewards.table import RewardFunction
from hybridflow.runtime import load_user_function, require_arguments


def load_reward_function(name: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that 'path/to/file.py:function' or 'package.module:function' names.

    Raises `RewardError` if the file, module or function does not exist, if the code fails on import, or if the function
    cannot be called with the keyword arguments data_source, solution_str, ground_truth, extra_info (or all of their
    plurals) and `kwargs`, nor has a parameter `completion` or `completions`.
    """
    function: RewardFunction = load_user_function(name, WHAT, RewardConfigError)
    check_signature(function, name, kwargs or {})
    return function


def check_signature(function: RewardFunction, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise `RewardError` if the function takes neither the four arguments, their plurals nor names, with `kwargs`."""
    require_arguments(function, name, WHAT, checked_arguments(function, kwargs), RewardConfigError)
