from fractions import Fraction

import pytest

from hybridflow.environments.rewards import ExpressionError, evaluate_arithmetic


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("1 + 2 * 3", 7, [1, 2, 3]),
        ("(1 + 2) * 3", 9, [1, 2, 3]),
        ("10 - 4 - 3", 3, [10, 4, 3]),
        ("24 / 4 / 2", 3, [24, 4, 2]),
        ("10-(4-3)", 9, [10, 4, 3]),
        ("1 / 3 * 6", 2, [1, 3, 6]),
        ("7 / 2", Fraction(7, 2), [7, 2]),
        ("-3 + 5", 2, [3, 5]),
        ("2 * -(3 - 5)", 4, [2, 3, 5]),
        (" ( ( 4 ) ) ", 4, [4]),
        ("007", 7, [7]),
    ],
)
def test_expressions_are_evaluated_by_the_rules_of_arithmetic(text, value, numbers):
    assert evaluate_arithmetic(text) == (value, numbers)


OTHERS = [
    *("", " ", "1 +", "* 2", "1 2", "(1", "1)", "()", "1 ** 2", "1 // 2", "1.5 + 2", "1e3", "x + 1", "1 + 2 = 3"),
    *("__import__('os')", "2 ^ 3", "1 % 2", "٣ + ٤", "²", "1\x00", "lambda: 1", "(1)(2)", "1 / 0", "5 / (3 - 3)"),
]


def test_other_texts_are_rejected():
    for text in OTHERS:
        with pytest.raises(ExpressionError):
            evaluate_arithmetic(text)


@pytest.mark.timeout(120)
def test_limits_are_enforced_without_evaluation():
    for text in ("9" * 400, "(" * 250 + "1" + ")" * 249, "-" * 400 + "1", "1+" * 10_000 + "1", "9" * 16):
        with pytest.raises(ExpressionError):
            evaluate_arithmetic(text)
    largest = "*".join(["999999999999999"] * 31)
    assert evaluate_arithmetic(largest)[0] == 999999999999999**31
    assert evaluate_arithmetic("(" * 50 + "1" + ")" * 50) == (1, [1])
