"""Multiplication: the number in the answer tag against the product."""

from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.answer_tag import last_answer
from hybridflow.rewards.number_text import parse_number


def multiplication_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if the last <answer>...</answer> of the response holds exactly the product, else 0.0."""
    product = parse_number(str(ground_truth))
    if product is None:
        raise RewardError(f"the ground truth must be a number such as '56088', got {ground_truth!r}.")
    answer = last_answer(solution_str)
    return float(answer is not None and parse_number(answer) == product)
