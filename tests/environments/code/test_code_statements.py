"""Statements that do not compile or check nothing are errors of the data, whatever the program is."""

import pytest

from hybridflow.environments.code.code_checks import steps_of
from hybridflow.environments.rewards import code_reward
from hybridflow.errors import RewardError

CLASS = "import unittest\nclass Tests(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 3)"
CHECK = "METADATA = {'author': 'x', 'counts': [1, -2]}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n"


def program(operator: str) -> str:
    return f"```python\ndef add(a, b):\n    return a {operator} b\n```"


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        ("x = 1\nassert add(1, 2 == 3", r"line 2, 'assert add\(1, 2 == 3': '\(' was never closed; correct the test\.$"),
        ("if True:\nassert add(1, 2) == 3", r"line 2, .*: expected an indented block"),
        ("return add(1, 2)", r"line 1, .*: 'return' outside function"),
        ("x = '\x00'", "null bytes"),
        ("x = '\ud800'", r"UnicodeEncodeError .* in \"x = "),
        ("(" * 10_000, "too many nested parentheses"),
        ("-" * 300_000 + "1", "MemoryError .*or make it shorter"),
        ("assert " + "+".join("1" * 200_000), "RecursionError .*or make it shorter"),
    ],
)
def test_statements_that_do_not_compile_are_an_error(statements, message):
    with pytest.raises(RewardError, match=rf"the statements of a test do not compile: .*{message}") as caught:
        code_reward("code", program("+"), {"tests": ["assert add(1, 2) == 3", statements]})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("statements", "fix"),
    [
        (CHECK, r"Call it: `check\(the function to test\)`\."),
        ("import pytest\ndef test_add():\n    assert add(1, 2) == 3", r"Call it: `test_add\(\)`\."),
        ("@pytest.mark.parametrize('a', [1])\ndef test_add(a):\n    assert add(a, 2) == 3", "Call it"),
        ("async def test_add():\n    assert await add(1, 2) == 3", r"Call it: `test_add\(\)`"),
        (CLASS, r"Run the tests of Tests: `unittest\.main\(\)`\."),
        ("class Empty(list):\n    pass", r"Run the tests of Empty"),
        ("pass", r"as in `assert add\(1, 2\) == 3`"),
        ("add(1, 2)", r"as in `assert add\(1, 2\) == 3`"),
        ("x = add(1, 2)\ndef test():\n    pass", r"Call it: `test\(\)`"),
        ("", r"as in `assert add\(1, 2\) == 3`"),
        ("'''Adds.'''\nexpected: int\nexpected = 3\n[3]  # all", r"as in `assert add\(1, 2\) == 3`"),
    ],
)
def test_statements_that_check_nothing_are_an_error(statements, fix):
    with pytest.raises(RewardError, match=rf"tests\[1\]: a test checks nothing, .*{fix}") as caught:
        code_reward("code", "a response without a program", {"tests": ["assert add(1, 2) == 3", statements]})
    assert "\n" not in str(caught.value)


def test_statements_that_may_fail_are_accepted():
    for statements in (
        *(f"{CHECK}\ncheck(add)", r"assert add('\d', '') == '\\d'", f"{CLASS}\nunittest.main()"),
        "class T:\n    assert add(1, 2) == 3",
        "@lambda test: test()\ndef test():\n    assert add(1, 2) == 3",
        "for x in range(3):\n    assert add(x, 2) == x + 2",
        "if add(1, 2) != 3:\n    raise ValueError",
    ):
        steps_of(statements)
