"""Reward for Countdown: an expression that uses each given number exactly once and equals the target."""

from collections.abc import Mapping
from operator import index
from typing import Any

from hybridflow.environments.rewards.answer_text import last_answer
from hybridflow.environments.rewards.arithmetic import ExpressionError, evaluate_arithmetic
from hybridflow.errors import RewardError


def countdown_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last `<answer>...</answer>` of the response solves the problem, else 0.0.

    `ground_truth` is {"target": int, "numbers": [int, ...]}. The answer is an expression, or an equation whose right
    side is the target. An answer that does not parse or divides by zero scores 0.0.
    """
    target, numbers = _read_problem(ground_truth)
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    expression, equals, right_side = answer.partition("=")
    if equals and right_side.strip() != str(target):
        return 0.0
    try:
        value, used = evaluate_arithmetic(expression)
    except ExpressionError:
        return 0.0
    return float(value == target and sorted(used) == sorted(numbers))


def _read_problem(ground_truth: Any) -> tuple[int, list[int]]:
    if isinstance(ground_truth, Mapping) and "target" in ground_truth and "numbers" in ground_truth:
        try:
            return index(ground_truth["target"]), [index(number) for number in ground_truth["numbers"]]
        except TypeError:
            pass
    raise RewardError(
        f"the ground truth must look like {{'target': 98, 'numbers': [44, 19, 35]}}, got {ground_truth!r}."
    )
