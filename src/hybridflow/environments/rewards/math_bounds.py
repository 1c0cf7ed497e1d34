"""Detection of LaTeX that is short but astronomic to compute: towers of powers, factorials, binomial coefficients.

Such a number is computed within one call into C, which cannot be interrupted; so the computation must not start.
"""

import math
import re

MAX_DEPTH = 12
MAX_DIGITS = 50
MAX_EXPONENT = 10_000
"""Limit of the product of all integer exponents of a text."""

_ESCAPED = re.compile(r"\\[^a-zA-Z]")
_WHOLE_EXPONENT = re.compile(r"\^[\s{(+-]*([0-9]+)")
_EXPONENT = re.compile(r"\s*[-+]?\s*(\\[a-zA-Z]+|[\w.]+)?\s*")
_SMALL_FACTORIAL = re.compile(
    r"(?<![0-9.])[0-9]{1,3}!(?!\s*!)|[a-zA-Z]!(?!\s*!)|\([a-zA-Z]\s*[-+]\s*[0-9]{1,3}\)!(?!\s*!)"
)
_GROWS_LIKE_FACTORIALS = re.compile(r"binom|choose|Gamma")
_LARGE_ARGUMENT = re.compile(r"(?:[0-9][^0-9]*){7}|\^")


def is_astronomic(text: str) -> bool:
    """Return whether a text has, or could have, a number of more than a few million digits, or is nested deeply.

    Within an exponent, only a power of a letter is accepted, as in e^{x^2}.
    """
    text = _ESCAPED.sub(" ", text).replace("**", "^")
    if re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text) or _depth(text) > MAX_DEPTH:
        return True
    if _GROWS_LIKE_FACTORIALS.search(text) and _LARGE_ARGUMENT.search(text):
        return True
    if "!" in _SMALL_FACTORIAL.sub("", text):
        return True
    exponents = [int(digits[:9]) for digits in _WHOLE_EXPONENT.findall(text)]
    return math.prod(max(1, exponent) for exponent in exponents) > MAX_EXPONENT or _has_tower(text)


def _has_tower(text: str) -> bool:
    for match in re.finditer(r"\^", text):
        start = match.end()
        end = _exponent_end(text, start)
        if text[end : end + 1] == "^":  # 9^9^9, 9^{9}^{9}
            return True
        for inner in re.finditer(r"(.?)\s*\^", text[start:end], re.DOTALL):
            inner_start = start + inner.end()
            if not inner[1].isalpha() or "^" in text[inner_start : _exponent_end(text, inner_start)]:
                return True
    return False


def _exponent_end(text: str, start: int) -> int:
    """Return the end of the exponent at `start`: after its groups, or after its word if that is not a command."""
    match = _EXPONENT.match(text, start)
    assert match is not None  # every part of it may be missing
    end = match.end()
    while text[end : end + 1] in ("{", "(") and not (match[1] and match[1][0] != "\\"):
        depth = 0
        while end < len(text):
            depth += (text[end] in "{(") - (text[end] in "})")
            end += 1
            if depth == 0:
                break
        end += len(text[end:]) - len(text[end:].lstrip())
        if not match[1]:
            break
    return end


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest
