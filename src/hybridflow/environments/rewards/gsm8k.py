"""Reward for GSM8K: compares the final number of a response with the ground truth."""

from typing import Any

from hybridflow.environments.rewards.answer_text import last_number, number_of_truth


def gsm8k_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last "#### number" of the response equals the ground truth, else 0.0 (strict extraction).

    Numbers compare by value: "1,234", "$1234" and "1234.0" are equal, and a period after a number is not part of it.
    """
    return float(last_number(solution_str, after="####") == number_of_truth(ground_truth, "72"))


def gsm8k_flexible_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last number anywhere in the response equals the ground truth, else 0.0 (flexible)."""
    return float(last_number(solution_str) == number_of_truth(ground_truth, "72"))
