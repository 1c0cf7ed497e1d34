"""Two rewards for countdown, for recipes with weighted rewards: a right answer, and a well-formed answer."""

from typing import Any

from hybridflow.rewards import countdown_reward


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, float]:
    """Return `score`, 1 for a right answer, and `format`, 1 for exactly one answer in its tags."""
    tags = solution_str.count("<answer>"), solution_str.count("</answer>")
    return {
        "score": countdown_reward(data_source, solution_str, ground_truth, extra_info),
        "format": float(tags == (1, 1)),
    }
