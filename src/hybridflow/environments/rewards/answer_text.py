"""Answers in the text of a response, between `<answer>` and `</answer>`, and rewards of one number: 1,234, $5, 3/4.

Truths and answers are read by the same functions, so what a truth may be an answer may be, and the other way round.
"""

import re
from fractions import Fraction
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.runtime.latex_box import last_boxed

# A sign counts unless it is an operator, as in "10-5"; a comma only before groups of three digits. A number does not
# begin within a word or a longer value: x2, 10:30, 2^5.
NUMBER = (
    r"(?<![A-Za-z_:^/])(?:(?<![\w)])[-+]\$?|\$-?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9])|/[0-9]+)?"
)
_ONE_NUMBER = re.compile(NUMBER)
_WITHIN_LONGER = re.compile(r"\w|[.:][0-9]|[/^]\S|\*[0-9(]")
"""Text after a number that is only a part of a value: 5x, 1.2.3, 10:30, 5/x, 2^5, 3*4."""
_OPERATOR = r"(?:[-+*/^=\u00d7\u00f7\u00b1\u2013~:;,']|\.\.|\\(?:times|cdot|div|pm)|(?:to|or|and)\b)"
_GOES_ON = re.compile(
    rf"[ \t\u00a0\u202f]*(?:{_OPERATOR}[ \t]*)?[0-9]|[ \t]*(?![,;:~']){_OPERATOR}[ \t]*\(|[ \t]*[+\u00d7\u00f7][ \t]*\w"
)
"""Text after a number that only begins an answer: 5-2, 1, 2, 5 or 6, 5 1/2, 5 + x."""
MINUS = str.maketrans({"\u2212": "-"})
"""The minus sign of Unicode is a sign of numbers."""
_MAX_CHARS = 100
_OPEN, _CLOSE = "<answer>", "</answer>"
_WRAPPED = re.compile(r"\$\$?([^$]*)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)


def unwrapped(text: str) -> str:
    r"""Return a text without outer spaces, $...$, \(...\), \[...\] and \boxed{...}."""
    text = text.strip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = next(group for group in wrapped.groups() if group is not None).strip()
    return last_boxed(text) or text


def parse_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number with spaces, $, commas and a final period at most; else None."""
    text = text.translate(MINUS).strip().rstrip(".")
    if len(text) > _MAX_CHARS or not _ONE_NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace("$", "").replace(",", "").partition("/")
    divisor = Fraction(denominator or 1)
    return Fraction(numerator) / divisor if divisor else None


def number_of_truth(ground_truth: Any, example: str) -> Fraction:
    """Return the value of a ground truth. Raises RewardError if it is not a number."""
    value = parse_number(unwrapped(str(ground_truth)))
    if value is None:
        raise RewardError(f"the ground truth must be a number such as '{example}', got {ground_truth!r}.")
    return value


def last_number(text: str, after: str = "") -> Fraction | None:
    """Return the last number in a text; with `after`, the last that follows this mark and spaces.

    None if there is none, and if it is a part of a longer value, as in 5x, 10:30 and 1.2.3.
    """
    text, match = text.translate(MINUS), None
    for match in re.finditer(rf"{re.escape(after)}\s*({NUMBER})" if after else rf"({NUMBER})", text):  # noqa: B007
        pass
    if match is None or _WITHIN_LONGER.match(text, match.end()) or (after and _GOES_ON.match(text, match.end())):
        return None
    return parse_number(match[1])


def last_answer(text: str) -> str | None:
    """Return the stripped content of the last complete `<answer>...</answer>`, or None, in linear time."""
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, max(end, 0))
    if start < 0:
        return None
    start += len(_OPEN)
    return text[start : text.find(_CLOSE, start)].strip()


def gsm8k_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last "#### number" of the response equals the ground truth, else 0.0 (strict extraction).

    Numbers compare by value: "1,234", "$1234" and "1234.0" are equal, and a period after a number is not part of it.
    """
    return float(last_number(solution_str, after="####") == number_of_truth(ground_truth, "72"))


def gsm8k_flexible_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last number anywhere in the response equals the ground truth, else 0.0 (flexible)."""
    return float(last_number(solution_str) == number_of_truth(ground_truth, "72"))


def multiplication_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1.0 if the last `<answer>...</answer>` of the response holds exactly the product, else 0.0."""
    product = number_of_truth(ground_truth, "56088")
    return float(parse_number(last_answer(solution_str) or "") == product)
