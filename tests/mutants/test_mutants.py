"""Faults are drawn by a seed and change one expression; a record tells which tests reach a fault."""

import ast
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the scripts of this folder import each other
from faults import draw_faults, faults_of
from judge import Recorded, read_record

SOURCE = Path(__file__).parents[2] / "src" / "hybridflow"
TEXT = '''
import math
LIMIT = 3 + 4


def f(a, b: "int | None", *rest):
    """Return nothing."""
    if a < b:
        raise ValueError(f"{a - b} is below {b}")
    names = [a[0], math.copysign(a, b), -a]
    log(a)
    while a and b == 1:
        a = a / "é" + len(rest) * b
    return names
'''


def test_each_kind_of_fault_is_found_once_per_expression():
    found = {(fault.kind, fault.before, fault.after) for fault in faults_of(TEXT, "f.py")}
    assert found == {
        ("comparison", "a < b", "(a <= b)"),
        ("check", "a < b", "(False)"),
        ("index", "0", "(0 + 1)"),
        ("arguments", "math.copysign(a, b)", "(math.copysign(b, a))"),
        ("sign", "-a", "(a)"),
        ("call", "log(a)", "(None)"),
        ("condition", "a and b == 1", "(a or b == 1)"),
        ("comparison", "b == 1", "(b != 1)"),
        ("arithmetic", 'a / "é" + len(rest) * b', "(a / 'é' - len(rest) * b)"),
        ("arithmetic", "len(rest) * b", "(len(rest) / b)"),
    }


def test_a_fault_replaces_its_expression_only():
    for fault in faults_of(TEXT, "f.py"):
        wrong = fault.replace(TEXT, fault.after)
        assert ast.unparse(ast.parse(wrong)) != ast.unparse(ast.parse(TEXT))
        assert fault.replace(TEXT, fault.before) == TEXT
        with pytest.raises(ValueError, match="the fault was drawn for another version"):
            fault.replace(TEXT.replace("\n", "\n\n", 2), fault.after)


def test_faults_of_the_source_are_drawn_by_their_seed():
    first, again, other = (draw_faults(SOURCE, count=30, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len({fault.path for fault in first}) == 30
    for fault in first:
        ast.parse(fault.replace((SOURCE / fault.path).read_text(), fault.after))
    assert {fault.path.split("/")[0] for fault in draw_faults(SOURCE, count=3, seed=1, only=("rollout",))} == {
        "rollout"
    }
    assert len(draw_faults(SOURCE, count=60, seed=1, only=("algorithms",))) == 60  # more than its files


def test_a_record_joins_hits_and_tests_by_process_and_time(tmp_path):
    records = [
        {"test": "a", "venv": ".venv", "fixtures": ["::run"], "pid": 1, "start": 0.0, "end": 10.0},
        {"test": "b", "venv": ".venv", "fixtures": ["::run"], "pid": 1, "start": 20.0, "end": 21.0},
        {"test": "c", "venv": ".venv-vllm", "fixtures": [], "pid": 2, "start": 0.0, "end": 30.0},
        {"test": "d", "venv": ".venv-vllm", "fixtures": [], "pid": 2, "start": 40.0, "end": 41.0},
        {"fixture": "::run", "pid": 1, "start": 1.0, "end": 5.0},
        {"hit": 0, "pid": 1, "time": 3.0},  # while the shared fixture is made: all its users
        {"hit": 1, "pid": 1, "time": 8.0},
        {"hit": 2, "pid": 9, "time": 20.5},  # another process: every test that runs then
        {"hit": 3, "pid": 2, "time": 40.5},
        {"outcome": "failed", "of": "d"},
    ]
    (tmp_path / "record.jsonl").write_text("\n".join(map(json.dumps, records)))
    reached, tests = read_record(tmp_path / "record.jsonl")
    assert reached == {0: {"a", "b"}, 1: {"a"}, 2: {"b", "c"}, 3: set()}
    assert tests == {"a": Recorded(10.0, ".venv"), "b": Recorded(1.0, ".venv"), "c": Recorded(30.0, ".venv-vllm")}
