"""Answers in the text of a response: between <answer> and </answer>, and exact numbers such as 1,234, $5 and -0.50."""

import re
from fractions import Fraction
from typing import Any

from hybridflow.errors import RewardError

# A sign counts unless it is an operator, as in "10-5"; a comma only before groups of three digits.
NUMBER = r"(?:(?<![\w)])[-+]\$?|\$-?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?"
_NUMBER = re.compile(NUMBER)
_MAX_CHARS = 100
_OPEN, _CLOSE = "<answer>", "</answer>"


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number with spaces, $, commas and a final period at most; else None."""
    text = text.strip().rstrip(".")
    if len(text) > _MAX_CHARS or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("$", "").replace(",", ""))


def number_of_truth(ground_truth: Any, example: str) -> Fraction:
    """Return the value of a ground truth. Raises RewardError if it is not a number."""
    value = parse_number(str(ground_truth))
    if value is None:
        raise RewardError(f"the ground truth must be a number such as '{example}', got {ground_truth!r}.")
    return value


def last_number(text: str, after: str = "") -> Fraction | None:
    """Return the last number in a text, or None; with `after`, the last number that follows this mark and spaces."""
    match = None
    for match in re.finditer(rf"{re.escape(after)}\s*({NUMBER})" if after else rf"({NUMBER})", text):  # noqa: B007
        pass
    return None if match is None else parse_number(match[1])


def last_answer(text: str) -> str | None:
    """Return the stripped content of the last complete <answer>...</answer>, or None, in linear time."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return text[start : text.find(_CLOSE, start)].strip()
