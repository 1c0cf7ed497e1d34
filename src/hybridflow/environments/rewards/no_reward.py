"""Constant reward for data without a ground truth to score by, such as the prompts of a distillation."""

from typing import Any


def no_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 0.0 for every response."""
    return 0.0
