"""Reward for mathematical answers in LaTeX, compared by value: math-verify parses, sympy compares."""

import logging
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from numbers import Number
from typing import Any

from hybridflow.environments.rewards.answer_text import MINUS, NUMBER, parse_number, unwrapped
from hybridflow.environments.rewards.limits import require_seconds
from hybridflow.environments.rewards.math_bounds import MAX_DIGITS, is_astronomic
from hybridflow.errors import RewardError
from hybridflow.runtime.deadline import DeadlineExceeded, call_within
from hybridflow.runtime.latex_box import last_boxed

MAX_CHARS = 300
MAX_TAIL_CHARS = 1000
"""Length of the last lines that are read of a response without a box."""

SMALL = 1e-4

_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]+)(?![\w^]|\.[0-9])")
_LAYOUT = re.compile(r"\\[,!;:]|\\color\s*\{[a-zA-Z]+\}|\\(?:left|right)(?![a-zA-Z])|\.\s*$")
"""Spaces, colors, sizes of brackets and a final period."""

_SIGNS = {**MINUS, ord("\u00b0"): r"^\circ"}
_MIXED = re.compile(r"(?<![\w.,/^])([0-9]+) +([1-9][0-9]*)/([0-9]+)(?![\w/^])")
"""2 1/2, which is 2.5."""
_EMPHASIS = re.compile(r"(?<![^\s(:])[*`_\"]+(?=[-+$]*\.?[0-9])|(?<=[0-9%.])[*`_\"]+(?![\w(*])")
_ONE_NUMBER = re.compile(NUMBER)
_VALUE = re.compile(
    r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|(?<![\w$\\])(?P<value>[(\[]\s*[-+.]*[0-9][-+0-9./\s]*,[-+0-9.,/\s]*[)\]]|"
    r"[0-9]+ +[1-9][0-9]*/[0-9]+(?![\w/^])|[-+]?\.?[0-9](?:\w|[-+.,:^*/](?=\w))*!*)",
    re.DOTALL,
)
"""A formula, or a value in prose that begins with a digit: 5, 1,000, 5x, 10:30, 2024-01-05, 5!, (1, 2), 2 1/2."""


def math_reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, timeout_s: float = 5.0
) -> float:
    r"""Return 1.0 if the last \boxed{...} of the response equals the ground truth in value, else 0.0.

    For a response without a box, the answer that math-verify finds in its last lines counts. `ground_truth` is a number
    or LaTeX such as "\\frac{1}{2}", optionally within $...$ or \boxed{...}; \fbox is a box too. Both are read by the
    same rule: 1.5e3 is 1500, fractions equal their decimals to 6 places, sets compare in any order, and units, "x ="
    and a percent sign may be missing. A truth that math-verify cannot parse, such as "A \\cup B", equals an answer of
    the same text. An answer of more than 300 characters, of astronomic size, or that takes longer than `timeout_s`
    seconds to compare scores 0.0 unless it is written exactly like the ground truth. The time limit holds in the main
    thread only, see `call_within`.
    """
    require_seconds("timeout_s", timeout_s)
    truth = _latex_of(ground_truth)
    gold = _gold(truth)
    boxed = last_boxed(solution_str)
    if boxed is None:
        answer = _prose(_tail(solution_str))
    elif _plain(_normalised(boxed)) == _plain(truth):
        return 1.0
    else:
        answer = rf"\boxed{{{_normalised(boxed)}}}" if len(boxed) <= MAX_CHARS else ""
    if not gold or not answer or is_astronomic(answer):
        return 0.0
    try:
        return float(call_within(timeout_s, _is_equal, gold, answer))
    except DeadlineExceeded:
        return 0.0


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, a number by its value, or None; equal texts are votes."""
    answer = unwrapped((last_boxed(text) or "").rstrip(" ."))
    if len(answer) > MAX_CHARS:
        return None
    number = parse_number(answer)
    return _plain(_normalised(answer)) or None if number is None else str(number)


def _latex_of(ground_truth: Any) -> str:
    """Return the LaTeX of a ground truth without its delimiters or box. Raises RewardError if it holds no answer."""
    if isinstance(ground_truth, str | Number) and ground_truth == ground_truth:  # not NaN
        truth = unwrapped(_normalised(unwrapped(str(ground_truth))))
        if truth:
            return truth
    raise _no_answer(ground_truth)


def _normalised(latex: str) -> str:
    """Return LaTeX without layout, and with 1.5e3 and 2 1/2 as LaTeX writes them."""
    latex = _MIXED.sub(r"\1\\frac{\2}{\3}", _LAYOUT.sub("", latex.translate(_SIGNS)))
    return _SCIENTIFIC.sub(lambda match: rf"{match[1]}\times 10^{{{match[2]}}}", latex)


def _prose(text: str) -> str:
    """Return a text in which math-verify finds no number that is only a part of a value, such as the 10 of 10:30.

    A last value that is more than a number becomes a formula, others are left out; 1.5e3 becomes 1500.
    """
    text = _EMPHASIS.sub("", text.translate(MINUS))
    values = [match for match in _VALUE.finditer(text) if match["value"]]

    def kept(match: re.Match[str]) -> str:
        value = match["value"]
        if not value:
            return _normalised(match[0])
        if _ONE_NUMBER.fullmatch(value):
            scientific = _SCIENTIFIC.search(value)
            few_digits = scientific and len(scientific[2]) <= 3 and abs(int(scientific[2])) < MAX_DIGITS
            return format(Decimal(value.replace(",", "")), "f") if few_digits else value
        return f"${_normalised(value)}$" if match.start() == values[-1].start() else " "

    return _VALUE.sub(kept, text)


@lru_cache(maxsize=256)  # the responses of a group share it
def _gold(truth: str) -> tuple[Any, ...]:
    """Return the values of a truth; none for a text that only an equal text equals."""
    parsed = _parse(rf"\boxed{{{truth}}}")
    if not parsed and len(truth) > MAX_CHARS:
        raise _no_answer(truth)
    return tuple(parsed)


def _no_answer(ground_truth: Any) -> RewardError:
    return RewardError(
        f"the ground truth must be a number or LaTeX such as '\\frac{{1}}{{2}}' that math-verify can parse, or a text "
        f"of at most {MAX_CHARS} characters, got {ground_truth!r:.400}."
    )


def _is_equal(gold: tuple[Any, ...], answer: str) -> bool:
    from math_verify import verify

    try:
        found = _parse(answer)
        return verify(list(gold), found, timeout_seconds=None) and not _are_small_and_different(gold, found)
    except Exception:  # the exceptions of sympy on a model's text have no common base
        return False


def _are_small_and_different(gold: Sequence[Any], found: Sequence[Any]) -> bool:
    """Return whether both are numbers so small that only rounding to 6 places makes them equal."""
    one, other = _number_of(gold), _number_of(found)
    if one is None or other is None or abs(one) > SMALL:
        return False
    return not math.isclose(one, other, rel_tol=1e-3)


def _number_of(items: Sequence[Any]) -> float | None:
    for item in items:
        if getattr(item, "is_number", False):
            try:
                return float(item)
            except TypeError:  # a complex number, or a percentage that sympy does not evaluate
                return None
    return None


def _parse(text: str) -> list[Any]:
    """Return the values that math-verify parses in a text; an empty list if it fails.

    Its own timeout is off: it uses SIGALRM, which only the main thread may set and `call_within` uses.
    """
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the timeout is off
    try:
        return parse(text, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    except Exception:  # as above
        return []


def _plain(text: str) -> str:
    plain = "".join(text.split())
    return plain.lower() if plain.lower() in ("true", "false") else plain


def _tail(text: str) -> str:
    tail = text[-MAX_TAIL_CHARS:]
    return tail.partition("\n")[2] if len(text) > MAX_TAIL_CHARS and "\n" in tail else tail
