"""No reward, for data that nothing is to be measured by, such as the prompts of a distillation."""

from typing import Any


def no_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """0.0, whatever the response."""
    return 0.0
