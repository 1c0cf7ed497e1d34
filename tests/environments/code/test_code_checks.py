"""Steps of a test: which assertions are protected, what is asked of the program, and what holds of its values."""

import pytest

from fixtures.programs_cheating import UNPROTECTED
from fixtures.programs_honest import HONEST, WRONG
from hybridflow.environments.code.code_checks import steps_of
from hybridflow.environments.code.code_values import Opaque, encode
from hybridflow.environments.rewards import code_reward

STARTS_PROCESSES = pytest.mark.own_run("grpo: programs of a model run in processes of their own")

PROTECTED = {
    # statements: what the program's process evaluates
    "assert f(2) == 4": ["f(2)"],
    "assert f(2) == 4, f'got {f(2)}'\nassert f(x=3) != -9": ["f(2)", "f(x=3)"],
    "assert 4 == f(2) and 3 < f(2) <= 5": ["f(2)", "f(2)"],
    "assert f('a') in ('b', 'c')": ["f('a')"],
    "assert f(2) is None": ["f(2)"],
    "assert f(2)": ["f(2)"],
    "assert not Solution().is_valid('(')": ["Solution().is_valid('(')"],
    "assert abs(f(2) - 1.4142) < 1e-3": ["f(2)"],
    "assert abs(1.4142 - f(2)) <= 10 ** -3": ["f(2)"],
    "import math\nassert math.isclose(f(2), math.pi, rel_tol=1e-9)": ["f(2)"],
    "from math import isclose\nassert isclose(f(2), 1.4)": ["f(2)"],
    "assert set(f([1, 2])) == set([2, 1])": ["set(f([1, 2]))"],
    "assert sorted(f(2), key=lambda x: -x) == [2, 1]": ["sorted(f(2), key=lambda x: -x)"],
    "assert decode(encode('x')) == 'x'": ["decode(encode('x'))"],
    "assert f(2)[0].name.upper() == 'A'": ["f(2)[0].name.upper()"],
    "assert [f(x) for x in range(3)] == [0, 1, 4]": ["[f(x) for x in range(3)]"],
    "assert apply(lambda x: x > 2, [1, 3]) == [False, True]": ["apply(lambda x: x > 2, [1, 3])"],
    "assert sum(10, 15) == 150": ["sum(10, 15)"],
    "from program import f as g\nassert g(2) == 4": ["g(2)"],
    "INFO = {'of': 'x'}\n\ndef check(candidate):\n    assert True\n    assert candidate(2) == 4\n\ncheck(f)": ["f(2)"],
}

NOT_PROTECTED = [
    *("x = f(2)\nassert x == 4", "for x in (1, 2):\n    assert f(x) == x", "assert f(2) == f(3)"),
    *("assert f(2) == 4 or f(2) == 5", "assert f(2) + g(2) == 4", "assert f(2) * 2 == 4"),
    *("assert all(f(x) == x for x in (1, 2))", "assert isinstance(f(2), int)", "assert isinstance(f(2), int) == True"),
    *("assert sum(abs(f(x) - y) for x, y in [(1, 2)]) == 0", "assert round(abs(f(2) - 1.41), 3) == 0"),
    *("assert list(filter(lambda x: x != 4, f(2))) == []", "assert [y for y in f(2) if y != 4] == []"),
    "def check(candidate):\n    x = candidate(2)\n    assert x == 4\ncheck(f)",
    "def check(candidate):\n    assert candidate(2) == 4\ncheck(f)\nassert check",
    "def close(a, b):\n    return abs(a - b) < 1\nassert close(f(2), 1.4)",
    "assert f(2) == 10 ** 10 ** 10",
    "assert f(2) == [0] * 10 ** 12",
]

HOLDS = [
    # statements, values of which it holds, values of which it does not
    ("assert f() == 3", [3, 3.0, type("Number", (int,), {})(3)], [4, "3", [3], None, Opaque(True), float("nan")]),
    ("assert f() != 3", [4, object()], [3]),
    ("assert f() == [1, (2, {'a': {3}})]", [[1, (2, {"a": {3}})]], [[1, [2, {"a": {3}}]], (1, (2, {"a": {3}}))]),
    ("assert f() is None", [None], [0, object()]),
    ("assert 1 < f() <= 3", [2, 3, 2.5], [1, 4, "2", None, object()]),
    ("assert 'a' in f()", [["a"], {"a"}, {"a": 1}, "ab"], ["b", [], 3]),
    ("assert f() not in (1, 2)", [3, object()], [1]),
    ("assert f()", [1, "a", object()], [0, "", [], type("Empty", (), {"__len__": lambda self: 0})()]),
    ("assert not f()", [0, None], [1, object()]),
    ("assert abs(f() - 1.5) < 0.1", [1.55, 1.45], [1.7, "1.5", None, object(), float("nan")]),
    ("assert math.isclose(f(), 1e9, rel_tol=1e-3)", [1e9 + 1], [2e9, 10**400, "x"]),
    ("assert f() == {1: [2]} and f() in [{1: [2]}]", [{1: [2]}], [{1: [3]}]),
    ("assert f() == max(2, 5) - len('ab')", [3], [5]),
    ("assert f() == sorted([2, 1]) + [float('inf')]", [[1, 2, float("inf")]], [[2, 1, float("inf")]]),
]


@pytest.mark.parametrize("statements", PROTECTED)
def test_an_assertion_about_one_value_is_protected(statements):
    found = steps_of(statements)
    assert found.checks
    assert [check.source for check in found.checks] == PROTECTED[statements]


@pytest.mark.parametrize("statements", [*NOT_PROTECTED, *(statements for _, statements in UNPROTECTED.values())])
def test_other_statements_run_in_the_programs_process(statements):
    assert not steps_of(statements).checks


@pytest.mark.parametrize(("statements", "right", "wrong"), HOLDS)
def test_values_are_compared_as_python_does(statements, right, wrong):
    check = steps_of(statements).checks[0]
    assert all(check.holds(encode(value)) for value in right)
    assert not any(check.holds(encode(value)) for value in wrong)


def test_an_answer_that_is_not_a_value_does_not_hold():
    for statements in ("assert f() != 3", "assert not f()"):
        assert not any(steps_of(statements).checks[0].holds(answer) for answer in (b"", b"x", b"[]", b'["["', b"{}"))


@pytest.mark.runs
@STARTS_PROCESSES
@pytest.mark.parametrize("name", [*HONEST, *WRONG])
def test_an_honest_program_is_judged_as_in_one_interpreter(name):
    program, statements = (HONEST | WRONG)[name]
    solution = f"```python\n{program}\n```"
    result = code_reward("code", solution, {"tests": [statements]}, timeout_s=60.0, total_timeout_s=150.0)
    assert (result["score"], result["passed"], result["compiled"]) == (name in HONEST, name in HONEST, 1.0)
