"""Statements of a test, run on the objects of a program in another process: honest ones as in one interpreter."""

import pytest

from fixtures.programs_honest import HONEST, WRONG
from hybridflow.rewards import code_reward

pytestmark = [pytest.mark.runs, pytest.mark.own_run("grpo: programs of a model run in processes of their own")]


@pytest.mark.parametrize("name", [*HONEST, *WRONG])
def test_an_honest_program_is_judged_as_in_one_interpreter(name):
    program, statements = (HONEST | WRONG)[name]
    solution = f"```python\n{program}\n```"
    result = code_reward("code", solution, {"tests": [statements]}, timeout_s=60.0, total_timeout_s=150.0)
    assert result == {"score": float(name in HONEST), "passed": float(name in HONEST), "compiled": 1.0}
