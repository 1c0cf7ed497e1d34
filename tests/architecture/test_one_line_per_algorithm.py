"""An advantage estimator or a policy loss is one file and one table line; no other source contains its name."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES

SOURCES = Path(__file__).parents[2] / "src" / "hybridflow"
NAMES = {*ESTIMATORS, *LOSSES}
SHARED_NAMES = {"none"}
"""Algorithm names that are also values of other keys."""

MINE = '''
def mine_advantages(*, scores, group_ids, values, baseline_scores):
    """Take glossary columns as keyword-only arguments, as the built-in estimators do."""
    advantages = (scores - baseline_scores)[:, None] - values
    return advantages, advantages
'''
LINE = 'ESTIMATORS["mine"] = Estimator("mine:mine_advantages", ("values", "baseline_scores"), compares_groups=True)\n'
PROGRAM = """
import sys
from hybridflow.config import load_config
from hybridflow.errors import ConfigError
try:
    load_config(None, ["algorithm.advantage=mine", "rollout.group_size=1"])
except ConfigError as error:
    print(error)
config = load_config(None, ["algorithm.advantage=mine"])
assert "torch" not in sys.modules
from hybridflow.trainers import run_on_placeholders
print(*sorted({event.where for event in run_on_placeholders(config) if event.kind == "call"}))
"""


def string_literals(tree: ast.AST) -> list[tuple[str, int]]:
    """Return string literals with their lines, without docstrings and keyword arguments (defaults, descriptions)."""
    excluded = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword | ast.Expr)}
    return [
        (node.value, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in excluded
    ]


def test_algorithm_names_appear_only_in_their_table():
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if path == SOURCES / "algorithms" / "declarations.py" or path.parent.name == "migration":
            continue  # names of other frameworks, beside ours
        for text, line in string_literals(ast.parse(path.read_text("utf-8"))):
            quoted = {text, *re.findall(r"'([^']*)'", text)}
            if quoted & (NAMES - SHARED_NAMES):
                found.append(f"{path.relative_to(SOURCES)}:{line}: {text!r}")
    assert found == []


def test_algorithm_keys_are_not_compared_with_literals():
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare | ast.Match):
                sides = [node.subject] if isinstance(node, ast.Match) else [node.left, *node.comparators]
                keys = [ast.unparse(side).rpartition(".")[2] for side in sides]
                texts = [side for side in sides if isinstance(side, ast.Constant | ast.Tuple | ast.List | ast.Set)]
                if {"advantage", "policy_loss"} & set(keys) and (texts or isinstance(node, ast.Match)):
                    found.append(f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []


@pytest.mark.slow
def test_new_estimator_needs_one_file_and_one_line(tmp_path):
    package = tmp_path / "hybridflow"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "algorithms" / "mine.py").write_text(MINE)
    with (package / "algorithms" / "declarations.py").open("a") as table:
        table.write(LINE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *problems, methods = done.stdout.splitlines()
    assert "rollout.group_size=1 makes every advantage of algorithm.advantage='mine' 0" in problems[-1]
    assert {
        "ActorRolloutWorker.generate_greedy_sequences",
        "CriticWorker.compute_values",
        "CriticWorker.update_critic",
    } <= set(methods.split())
