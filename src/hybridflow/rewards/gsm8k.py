"""GSM8K: the final number of a response against the ground truth."""

from typing import Any

from hybridflow.rewards.number_text import last_number, number_of_truth


def gsm8k_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if the last "#### number" of the response is the ground truth, else 0.0 (strict extraction).

    Numbers compare by value: "1,234", "$1234" and "1234.0" are equal, and a full stop after one is no part of it.
    """
    return float(last_number(solution_str, after="####") == number_of_truth(ground_truth, "72"))


def gsm8k_flexible_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if the last number anywhere in the response is the ground truth, else 0.0 (flexible extraction)."""
    return float(last_number(solution_str) == number_of_truth(ground_truth, "72"))
