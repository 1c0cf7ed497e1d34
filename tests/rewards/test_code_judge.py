"""Statements of a test, run on the objects of a program in another process: honest ones as in one interpreter."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fixtures.programs_honest import HONEST
from hybridflow.rewards import code_reward

pytestmark = pytest.mark.slow


def passes(case) -> bool:
    program, statements, _ = case
    solution = f"```python\n{program}\n```"
    result = code_reward("code", solution, {"tests": [statements]}, timeout_s=60.0, total_timeout_s=150.0)
    assert result["compiled"] == 1.0
    return result["score"] == 1.0


def test_honest_programs_are_judged_as_in_one_interpreter():
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(passes, HONEST))
    wrong = [case[:2] for case, result in zip(HONEST, results, strict=True) if result != case[2]]
    assert not wrong
