"""GSM8K: the final number of a response against the ground truth."""

from fractions import Fraction
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.number_text import last_number, parse_number


def gsm8k_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if the last "#### number" of the response is the ground truth, else 0.0 (strict extraction).

    Numbers compare by value: "1,234", "$1234" and "1234.0" are equal, and a full stop after one is no part of it.
    """
    return float(last_number(solution_str, after="####") == _expected(ground_truth))


def gsm8k_flexible_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if the last number anywhere in the response is the ground truth, else 0.0 (flexible extraction)."""
    return float(last_number(solution_str) == _expected(ground_truth))


def _expected(ground_truth: Any) -> Fraction:
    value = parse_number(str(ground_truth))
    if value is None:
        raise RewardError(f"the ground truth must be a number such as '72', got {ground_truth!r}.")
    return value
