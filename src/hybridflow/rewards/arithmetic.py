"""An arithmetic parser for text that a model wrote: whole numbers, + - * / and parentheses, exact, bounded, no `eval`.

sum     = product (("+" | "-") product)*
product = factor (("*" | "/") factor)*
factor  = ("+" | "-") factor | number | "(" sum ")"
"""

import re
from fractions import Fraction

from hybridflow.errors import RewardError

MAX_CHARS = 500
MAX_DIGITS = 15
MAX_DEPTH = 50
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")


class ExpressionError(RewardError):
    """A text is not an arithmetic expression, is beyond the bounds, or divides by zero."""


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """Return (value, the numbers used, in order).

    Raises `ExpressionError` for anything else than the grammar above, for division by zero, and beyond 500 characters,
    15 digits or 50 levels.
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"the expression has {len(text)} characters; at most {MAX_CHARS} are read.")
    parser = _Parser(_tokens(text))
    value = parser.sum(0)
    if parser.peek():
        raise ExpressionError(f"unexpected {parser.peek()!r} in {text!r}.")
    return value, parser.numbers


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    text = text.rstrip()
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected {text[position:].strip()[0]!r} in {text!r}.")
        tokens.append(match[1] or match[2])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens; "" stands for the end."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self.numbers: list[int] = []

    def peek(self) -> str:
        return self._tokens[self._position] if self._position < len(self._tokens) else ""

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.peek() in ("+", "-"):
            if self._take() == "+":
                value += self._product(depth)
            else:
                value -= self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.peek() in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
                continue
            divisor = self._factor(depth)
            if divisor == 0:
                raise ExpressionError("division by zero.")
            value /= divisor
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"the expression is nested deeper than {MAX_DEPTH} levels.")
        token = self._take()
        if token.isdigit():
            if len(token) > MAX_DIGITS:
                raise ExpressionError(f"a number of {len(token)} digits; at most {MAX_DIGITS} are read.")
            self.numbers.append(int(token))
            return Fraction(int(token))
        if token in ("+", "-"):
            value = self._factor(depth + 1)
            return -value if token == "-" else value
        if token != "(":
            raise ExpressionError(f"a number or '(' must come here, got {token!r}.")
        value = self.sum(depth + 1)
        if self._take() != ")":
            raise ExpressionError("a '(' is not closed.")
        return value

    def _take(self) -> str:
        token = self.peek()
        self._position += 1
        return token
