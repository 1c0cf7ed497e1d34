"""Reward for multiplication: compares the number in the answer tag with the product."""

from typing import Any

from hybridflow.environments.rewards.answer_text import last_answer, number_of_truth, parse_number


def multiplication_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last `<answer>...</answer>` of the response holds exactly the product, else 0.0."""
    product = number_of_truth(ground_truth, "56088")
    answer = last_answer(solution_str)
    return float(answer is not None and parse_number(answer) == product)
