"""A new advantage estimator is one file and one line of the table (test_names.py: no other source has its name)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "hybridflow"
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


@pytest.mark.exhaustive
@pytest.mark.own_run("grpo: runs a changed copy of the source")
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
    needed = {"ActorRolloutWorker.generate_greedy_sequences", "CriticWorker.compute_values"}
    assert needed | {"CriticWorker.update_critic"} <= set(methods.split())
