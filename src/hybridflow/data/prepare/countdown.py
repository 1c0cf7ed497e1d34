"""Countdown: reach a target with given numbers, each used once. Generated from a seed; train and test are disjoint."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.data.prepare.problems import draw_disjoint, fill_template, write_problems
from hybridflow.data.prepare.prompt_file import PreparedFiles
from hybridflow.errors import DataConfigError

COUNTDOWN_PROMPT = (
    "Using the numbers [{numbers}], make an equation that equals {target}. Use the operations {operators} and "
    "parentheses, and use each number exactly once. Show your work, then give the final answer in <answer> </answer>, "
    "for example <answer>(1 + 2) / 3</answer>."
)
"""The prompt of a countdown problem."""
_MAX_OPERANDS = 10


@dataclass(frozen=True)
class CountdownProblem:
    """Numbers in the order of the prompt, the target, and one solution (ignored when problems are compared)."""

    numbers: tuple[int, ...]
    target: int
    solution: str = field(compare=False, default="")

    @property
    def group(self) -> tuple[int, ...]:
        """Multiset of the numbers; train and test share none."""
        return tuple(sorted(self.numbers))


def generate_countdown(
    *,
    train_size: int,
    test_size: int,
    num_operands: int | Sequence[int] = (3, 4),
    max_number: int = 99,
    max_target: int = 999,
    operators: str = "+-*/",
    seed: int = 0,
) -> tuple[list[CountdownProblem], list[CountdownProblem]]:
    """Return (train, test) problems, all solvable, with numbers 1..max_number and targets 1..max_target.

    `num_operands` is one count of numbers or several, each drawn equally often. With `+` and `-` only, the target is
    drawn uniformly over the sign patterns that give a valid one, so that adding all numbers is right no more often than
    another pattern. With `*` or `/` a random expression is drawn, with a division only if it leaves no remainder.
    Raises DataError for options out of range and if there are not enough different problems.
    """
    counts = (num_operands,) if isinstance(num_operands, int) else tuple(num_operands)
    _check_options(counts, max_number, max_target, operators)
    noise = random.Random(seed)
    operators = "".join(sorted(set(operators)))
    draw_target = _draw_signed_sum if set(operators) <= {"+", "-"} else _draw_expression

    def draw() -> CountdownProblem | None:
        numbers = tuple(noise.randint(1, max_number) for _ in range(noise.choice(counts)))
        return draw_target(noise, numbers, operators, max_target)

    num_groups = sum(math.comb(max_number + count - 1, count) for count in set(counts))
    widen = "raise max_number, max_target or num_operands, or allow more operators"
    return draw_disjoint(draw, num_groups=num_groups, train_size=train_size, test_size=test_size, widen=widen)


def prepare_countdown(
    output_dir: str | Path,
    *,
    train_size: int = 20_000,
    test_size: int = 1_000,
    num_operands: int | Sequence[int] = (3, 4),
    max_number: int = 99,
    max_target: int = 999,
    operators: str = "+-*/",
    seed: int = 0,
    prompt_template: str = COUNTDOWN_PROMPT,
    number_separator: str = ", ",
) -> PreparedFiles:
    """Generate problems (see `generate_countdown`) and write `train.parquet` and `test.parquet`.

    `prompt_template` holds {numbers} (joined by `number_separator`) and {target}, and may hold {operators}.
    The ground truth is {"target": int, "numbers": [int, ...]}; `extra_info.answer` is one solution.
    """
    problems = generate_countdown(
        train_size=train_size,
        test_size=test_size,
        num_operands=num_operands,
        max_number=max_number,
        max_target=max_target,
        operators=operators,
        seed=seed,
    )

    def describe(problem: CountdownProblem) -> tuple[str, dict[str, Any], str]:
        prompt = countdown_prompt(problem, operators, prompt_template, number_separator)
        return prompt, {"target": problem.target, "numbers": list(problem.numbers)}, problem.solution

    return write_problems(output_dir, "countdown", problems, describe)


def countdown_prompt(
    problem: CountdownProblem,
    operators: str = "+-*/",
    prompt_template: str = COUNTDOWN_PROMPT,
    number_separator: str = ", ",
) -> str:
    """Return the text of a problem's prompt."""
    values = {
        "numbers": number_separator.join(str(number) for number in problem.numbers),
        "target": str(problem.target),
        "operators": " ".join(operators),
    }
    return fill_template(prompt_template, values, required=("numbers", "target"))


def _check_options(counts: tuple[int, ...], max_number: int, max_target: int, operators: str) -> None:
    if not counts or any(not 2 <= count <= _MAX_OPERANDS for count in counts):
        raise DataConfigError(
            f"num_operands={counts} is invalid: expected one or several counts from 2 to {_MAX_OPERANDS}."
        )
    if max_number < 1 or max_target < 1:
        raise DataConfigError(f"max_number={max_number} and max_target={max_target} must be at least 1.")
    if not operators or not set(operators) <= set("+-*/"):
        raise DataConfigError(f"operators={operators!r} is invalid: expected some of + - * / in one text, as in '+-'.")


def _draw_signed_sum(
    noise: random.Random, numbers: tuple[int, ...], operators: str, max_target: int
) -> CountdownProblem | None:
    """Draw uniformly among the sign patterns whose sum is a valid target; bit i of a pattern subtracts number i."""
    total = sum(numbers)
    patterns: list[tuple[int, int]] = []
    for pattern in range(2 ** len(numbers) - 1):
        num_minus = pattern.bit_count()
        if ("-" not in operators and num_minus > 0) or ("+" not in operators and num_minus < len(numbers) - 1):
            continue
        target = total - 2 * sum(number for i, number in enumerate(numbers) if pattern >> i & 1)
        if 1 <= target <= max_target:
            patterns.append((pattern, target))
    if not patterns:
        return None
    pattern, target = noise.choice(patterns)
    added = [str(number) for i, number in enumerate(numbers) if not pattern >> i & 1]
    subtracted = [str(number) for i, number in enumerate(numbers) if pattern >> i & 1]
    return CountdownProblem(numbers, target, " - ".join([" + ".join(added), *subtracted]))


def _draw_expression(
    noise: random.Random, numbers: tuple[int, ...], operators: str, max_target: int
) -> CountdownProblem | None:
    """Combine two random operands by a random operator until one is left; return None if its value is invalid."""
    operands = [(number, str(number), "") for number in numbers]
    while len(operands) > 1:
        left = operands.pop(noise.randrange(len(operands)))
        right = operands.pop(noise.randrange(len(operands)))
        divides = right[0] != 0 and left[0] % right[0] == 0
        usable = [operator for operator in operators if operator != "/" or divides]
        if not usable:
            return None
        operands.append(_combine(left, noise.choice(usable), right))
    target, solution, _ = operands[0]
    return CountdownProblem(numbers, target, solution) if 1 <= target <= max_target else None


def _combine(left: tuple[int, str, str], operator: str, right: tuple[int, str, str]) -> tuple[int, str, str]:
    """Return value, text and outermost operator of `left operator right`, without needless parentheses."""
    left_value, left_text, left_operator = left
    right_value, right_text, right_operator = right
    if operator in "*/" and left_operator in ("+", "-"):
        left_text = f"({left_text})"
    needs_parentheses = {"+": (), "-": ("+", "-"), "*": ("+", "-", "/"), "/": ("+", "-", "*", "/")}[operator]
    if right_operator in needs_parentheses:
        right_text = f"({right_text})"
    value = {
        "+": lambda: left_value + right_value,
        "-": lambda: left_value - right_value,
        "*": lambda: left_value * right_value,
        "/": lambda: left_value // right_value,
    }[operator]()
    return value, f"{left_text} {operator} {right_text}", operator
