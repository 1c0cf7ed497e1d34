"""Loading and signature check of a user's reward function."""

from collections.abc import Mapping
from typing import Any

from hybridflow.errors import RewardConfigError
from hybridflow.rewards.reward_process import ARGUMENTS, BATCH_ARGUMENTS, WHAT, takes_batches
from hybridflow.rewards.table import RewardFunction
from hybridflow.runtime import load_user_function, require_arguments


def load_reward_function(name: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that 'path/to/file.py:function' or 'package.module:function' names.

    Raises `RewardError` if the file, module or function does not exist, if the code fails on import, or if the function
    cannot be called with the keyword arguments data_source, solution_str, ground_truth, extra_info (or all of their
    plurals) and `kwargs`.
    """
    function: RewardFunction = load_user_function(name, WHAT, RewardConfigError)
    check_signature(function, name, kwargs or {})
    return function


def check_signature(function: RewardFunction, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise `RewardError` if the function does not accept the four arguments, or their plurals, and `kwargs`."""
    arguments = BATCH_ARGUMENTS if takes_batches(function) else ARGUMENTS
    require_arguments(function, name, WHAT, (*arguments, *kwargs), RewardConfigError)
