"""`make demo-tools` with fewer steps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.observability import read_jsonl

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_of_tools_runs_to_its_last_line(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    few = ["--sft", "controller.threads=1", "--sft", "trainer.total_steps=4", "--sft", "offline.batch_size=8"]
    for change in (
        "controller.threads=1",
        "trainer.total_steps=2",
        "trainer.val_every=0",
        "data.train_batch_size=2",
        "validation.max_samples=8",
    ):
        few += ["--grpo", change]
    few += ["--conversations", "64"]
    program = [sys.executable, str(ROOT / "examples" / "tools_demo.py"), *few]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"demo-tools: accuracy \d\.\d{3} -> \d\.\d{3} on 8 held-out problems in \d+ s", last)
    runs = tmp_path / "runs" / "tools"
    for name in ("calculator", "single", "maze"):
        assert (runs / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    turns = [each for row in read_jsonl(runs / "maze" / "rollouts.jsonl") for each in row["turns"]]
    assert max(turns) > 1
