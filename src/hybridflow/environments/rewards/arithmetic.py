"""Countdown, and exact, bounded evaluation of what a model wrote: whole numbers, + - * /, parentheses; without `eval`.

Python's parser builds the syntax tree; each node is checked, and no code is executed.
"""

import ast
import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from operator import index
from typing import Any

from hybridflow.environments.rewards.answer_text import last_answer
from hybridflow.errors import RewardError

MAX_CHARS = 500
MAX_DIGITS = 15
MAX_DEPTH = 50

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ExpressionError(RewardError):
    """A text that is not an arithmetic expression, exceeds the limits, or divides by zero."""


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]]:
    """Return the value and the numbers used, in order.

    Raises:
        ExpressionError: The text holds anything but whole numbers, + - * / and parentheses, divides by zero, or has
            more than 500 characters, 15 digits in a number, or 50 levels of parentheses and signs.
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"the expression has {len(text)} characters; expected at most {MAX_CHARS}.")
    plain = re.sub(r"\s", " ", text).strip()
    if unexpected := re.search(r"[^-+*/() 0-9]", plain):
        raise ExpressionError(f"unexpected {unexpected[0]!r} in {text!r}; use whole numbers, + - * / and parentheses.")
    if too_long := re.search(rf"[0-9]{{{MAX_DIGITS + 1},}}", plain):
        raise ExpressionError(f"a number has {len(too_long[0])} digits; expected at most {MAX_DIGITS}.")
    plain = re.sub(r"(?<![0-9])0+(?=[0-9])", "", plain)  # 007 is 7
    try:
        tree = ast.parse(plain, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ExpressionError(f"{text!r} is not an arithmetic expression.") from None
    numbers: list[int] = []

    def value_of(node: ast.expr, num_signs: int = 0) -> Fraction:
        match node:
            case ast.Constant(value=int(number), col_offset=at):
                before = plain[:at]
                if num_signs + before.count("(") - before.count(")") > MAX_DEPTH:
                    raise ExpressionError(f"the expression is nested deeper than {MAX_DEPTH} levels.")
                numbers.append(number)
                return Fraction(number)
            case ast.UnaryOp(op=sign, operand=operand) if num_signs <= MAX_DEPTH:
                return _SIGNS[type(sign)](value_of(operand, num_signs + 1))
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
                values = value_of(left, num_signs), value_of(right, num_signs)
                if type(operation) is ast.Div and values[1] == 0:
                    raise ExpressionError("division by zero.")
                return _OPERATIONS[type(operation)](*values)
        raise ExpressionError(f"{text!r} is not an arithmetic expression, or nested deeper than {MAX_DEPTH} levels.")

    return value_of(tree.body), numbers


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
