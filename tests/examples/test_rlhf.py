"""examples/rlhf.py with fewer steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.observability import read_jsonl

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute on an idle machine
def test_a_reward_model_is_learned_from_pairs_and_policies_improve(tmp_path):
    changes = ["sft.trainer.total_steps=40", "reward_model.trainer.total_steps=80", "ppo.trainer.total_steps=12"]
    changes += ["dpo.trainer.total_steps=60", "ppo.trainer.val_every=0", "ppo.trainer.val_before_train=false"]
    program = [sys.executable, str(ROOT / "examples" / "rlhf.py"), *(f"--set={change}" for change in changes)]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracies = json.loads((tmp_path / "runs" / "rlhf" / "summary.json").read_text())
    assert accuracies["reward_model"] > 0.9
    rewards = [row["critic/score/mean"] for row in read_jsonl(tmp_path / "runs" / "rlhf" / "ppo" / "metrics.jsonl")]
    assert rewards[-1] > rewards[0] + 2
    assert accuracies["dpo"] > 2 * accuracies["sft"]
