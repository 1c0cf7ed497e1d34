"""Numbers as people and models write them: 1,234 and $5 and -0.50, exactly, as fractions."""

import re
from fractions import Fraction
from typing import Any

from hybridflow.errors import RewardError

# A sign counts only where it does not join two things, as in "10-5"; a comma only before groups of three digits.
NUMBER = r"(?:(?<![\w)])[-+]\$?|\$-?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?"
_NUMBER = re.compile(NUMBER)
_MAX_CHARS = 100


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is one number and nothing else but spaces, $, commas and a full stop; else None."""
    text = text.strip().rstrip(".")
    if len(text) > _MAX_CHARS or not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace("$", "").replace(",", ""))


def number_of_truth(ground_truth: Any, example: str) -> Fraction:
    """The value of a ground truth. Raises RewardError if it is not a number."""
    value = parse_number(str(ground_truth))
    if value is None:
        raise RewardError(f"the ground truth must be a number such as '{example}', got {ground_truth!r}.")
    return value


def last_number(text: str, after: str = "") -> Fraction | None:
    """The last number in a text; with `after`, the last that follows this mark, spaces aside. None without any."""
    match = None
    for match in re.finditer(rf"{re.escape(after)}\s*({NUMBER})" if after else rf"({NUMBER})", text):  # noqa: B007
        pass
    return None if match is None else parse_number(match[1])
