"""What is wrong with a code test, a program or a limit before any program runs."""

import os
from types import SimpleNamespace

import pytest

from hybridflow.environments.code.code_tests import last_code_block
from hybridflow.environments.rewards import code_reward
from hybridflow.errors import RewardError

SUM = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
ADD = {"tests": ["assert add(1, 2) == 3"]}
NO_PROGRAM = {"score": 0.0, "passed": 0.0, "compiled": 0.0, "unprotected": 0.0}


def test_no_program_runs_on_an_unsupported_machine(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(RewardError, match=r"(?s)so no program was run.*not 'riscv64'.*Linux 5.13"):
        code_reward("code", "```python\npass\n```", ADD)


def test_ground_truth_without_tests_is_an_error():
    of_tests = ({"tests": []}, {"tests": "assert True"}, {"tests": [1]}, {**SUM, **ADD})
    for truth in (None, "no JSON", "[]", {}, {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}, *of_tests):
        with pytest.raises(RewardError, match="the ground truth must look like"):
            code_reward("code", "```python\n1\n```", truth)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```", "a"),
        ("```\na\n```", "a"),
        ("```py\na\n\nb\n```\n```Python3\nc\n```", "c"),
        ("  ```python\n  a\n  ```", "a"),
        ("```python\na\n```\n```json\n{}\n```", "a"),
        ("```python\na\n```\n```python\nb", "a"),
        ("```python\na```", "a"),
        ("~~~python\na\n```\n~~~", "a\n```"),
        ("````{.python}\n```\n````", "```"),
        ("```python\n```", ""),
        ("print(1)", None),
        ("```rust\na\n```", None),
        ("``` `" * 1000, None),
    ],
)
def test_the_last_complete_block_of_python_is_the_program(text, block):
    assert last_code_block(text) == block


def test_a_response_without_a_program_scores_zero():
    assert code_reward("code", "print(3)", SUM) == NO_PROGRAM
    assert code_reward("code", f"```python\n{'#' * 300_000}\n```", SUM) == NO_PROGRAM


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("timeout_s", (0, float("nan")), "must be more than 0 seconds"),
        ("total_timeout_s", (0,), "must be more than 0 seconds"),
        ("memory_bytes", (2**20, 1.5e9), "must be a whole number, 33554432 or more"),
        ("max_output_bytes", (0,), "must be a whole number, 1 or more"),
        ("max_tests", (-1,), "must be a whole number, 0 or more"),
    ],
)
def test_limits_out_of_range_are_an_error(name, values, message):
    for value in values:
        with pytest.raises(RewardError, match=f"{name}={value} {message}"):
            code_reward("code", "```python\n1\n```", SUM, **{name: value})
