"""Reward shaping: correctness, format and length of a response as separate numbers that a recipe weighs."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hybridflow.environments.rewards.limits import is_number
from hybridflow.environments.rewards.table import reward_of
from hybridflow.errors import RewardError

MAX_CHARS = 200_000
"""Longer texts do not match: the time of a regular expression grows with the text, for some quadratically."""

_NO_TAG = r"(?:(?!</?(?:think|answer)>).)*+"
THINK_THEN_ANSWER = rf"\s*+<think>{_NO_TAG}</think>\s*+<answer>{_NO_TAG}</answer>\s*+"
"""One `<think>...</think>`, then one `<answer>...</answer>`, without nested tags or further text."""


def format_score(text: str, pattern: str = THINK_THEN_ANSWER) -> float:
    """Return 1.0 if the whole text matches the regular expression, in which "." is any character, else 0.0.

    A text of more than 200,000 characters does not match. Raises `RewardError` for an invalid regular expression.
    """
    expression = _compiled(pattern)
    return float(len(text) <= MAX_CHARS and expression.fullmatch(text) is not None)


def length_score(length: float, max_length: float, falls_to_zero_at: float) -> float:
    """Return 1.0 up to `max_length`, then a linear decay to 0.0 at `falls_to_zero_at`; all in the same unit.

    Raises `RewardError` unless 0 <= max_length <= falls_to_zero_at.
    """
    are_numbers = is_number(max_length) and is_number(falls_to_zero_at)
    if not (are_numbers and 0 <= max_length <= falls_to_zero_at and math.isfinite(falls_to_zero_at)):
        raise RewardError(
            f"{max_length=} and {falls_to_zero_at=} must be finite, at least 0, and in this "
            "order; max_length is the longest length with score 1."
        )
    if length <= max_length:
        return 1.0
    if length >= falls_to_zero_at:
        return 0.0
    return (falls_to_zero_at - length) / (falls_to_zero_at - max_length)


def shaped_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    pattern: str = THINK_THEN_ANSWER,
    max_chars: int = 4000,
    falls_to_zero_at: int = 8000,
) -> dict[str, float]:
    """Return the correctness, format and length scores of a response.

    The result is {"score", "correct", "format": 0 or 1, "length": 0 to 1}, where "score" and "correct" are the score of
    the built-in function in `REWARDS` for the data source. A recipe weighs them: reward.weights = {correct = 1.0,
    format = 0.2, length = 0.1}. Lengths are in characters.
    """
    result = reward_of(data_source)(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )
    correct = float(result["score"] if isinstance(result, Mapping) else result)
    return {
        "score": correct,
        "correct": correct,
        "format": format_score(solution_str, pattern),
        "length": length_score(len(solution_str), max_chars, falls_to_zero_at),
    }


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError, TypeError) as error:
        raise RewardError(
            f"pattern={pattern!r:.300} is not a regular expression: {error}; write one that matches the whole "
            "response, such as '<answer>.*</answer>'."
        ) from None
