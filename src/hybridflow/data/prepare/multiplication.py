"""Multiplication of two numbers with given digit counts. Generated from a seed; train and test are disjoint."""

import random
from dataclasses import dataclass
from pathlib import Path

from hybridflow.data.prepare.problems import draw_disjoint, fill_template, write_problems
from hybridflow.data.prepare.prompt_file import PreparedFiles
from hybridflow.errors import DataConfigError

MULTIPLICATION_PROMPT = (
    "What is {a} * {b}? Show your work, then give the final answer in <answer> </answer>, for example "
    "<answer>56</answer>."
)
"""The prompt of a multiplication problem."""
_MAX_DIGITS = 30


@dataclass(frozen=True)
class MultiplicationProblem:
    """Two factors in the order of the prompt."""

    a: int
    b: int

    @property
    def target(self) -> int:
        """Product of the factors."""
        return self.a * self.b

    @property
    def group(self) -> tuple[int, int]:
        """Unordered pair of the factors; train and test share none."""
        return min(self.a, self.b), max(self.a, self.b)


def generate_multiplication(
    *, train_size: int, test_size: int, digits_a: int = 3, digits_b: int = 3, seed: int = 0
) -> tuple[list[MultiplicationProblem], list[MultiplicationProblem]]:
    """Return (train, test): factors of `digits_a` and `digits_b` digits; no pair is in both, not even swapped.

    Raises DataError for digit counts outside 1..30 and if there are not enough different problems.
    """
    for name, digits in (("digits_a", digits_a), ("digits_b", digits_b)):
        if not 1 <= digits <= _MAX_DIGITS:
            raise DataConfigError(f"{name}={digits} is invalid: expected 1 to {_MAX_DIGITS} digits.")
    noise = random.Random(seed)

    def draw() -> MultiplicationProblem:
        a = noise.randint(10 ** (digits_a - 1), 10**digits_a - 1)
        b = noise.randint(10 ** (digits_b - 1), 10**digits_b - 1)
        return MultiplicationProblem(a, b)

    num_a, num_b = 9 * 10 ** (digits_a - 1), 9 * 10 ** (digits_b - 1)
    num_groups = num_a * (num_a + 1) // 2 if digits_a == digits_b else num_a * num_b
    widen = "raise digits_a or digits_b"
    return draw_disjoint(draw, num_groups=num_groups, train_size=train_size, test_size=test_size, widen=widen)


def prepare_multiplication(
    output_dir: str | Path,
    *,
    train_size: int = 20_000,
    test_size: int = 1_000,
    digits_a: int = 3,
    digits_b: int = 3,
    seed: int = 0,
    prompt_template: str = MULTIPLICATION_PROMPT,
) -> PreparedFiles:
    """Generate problems (see `generate_multiplication`) and write `train.parquet` and `test.parquet`.

    `prompt_template` holds {a} and {b}. The ground truth is the product as text.
    """
    problems = generate_multiplication(
        train_size=train_size, test_size=test_size, digits_a=digits_a, digits_b=digits_b, seed=seed
    )

    def describe(problem: MultiplicationProblem) -> tuple[str, str, str]:
        values = {"a": str(problem.a), "b": str(problem.b)}
        return fill_template(prompt_template, values, required=("a", "b")), str(problem.target), str(problem.target)

    return write_problems(output_dir, "multiplication", problems, describe)
