"""`make demo` and `make demo-control` with fewer steps."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.observability import read_jsonl

ROOT = Path(__file__).parents[2]


def run_demo(directory, *arguments):
    program = [sys.executable, str(ROOT / "examples" / "countdown_demo.py"), *arguments]
    done = subprocess.run(program, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_and_its_control_run_from_the_same_warm_start(tmp_path):
    few = [part for name in ("--sft", "--grpo") for part in (name, "controller.threads=1")]
    few += ["--sft", "trainer.total_steps=30", "--sft", "offline.batch_size=32"]
    for change in (
        "trainer.total_steps=2",
        "trainer.val_every=0",
        "data.train_batch_size=8",
        "validation.max_samples=40",
    ):
        few += ["--grpo", change]
    output = run_demo(tmp_path, *few)
    runs = tmp_path / "runs" / "countdown"
    summary = json.loads((runs / "summary.json").read_text())
    result = f"demo: accuracy {summary['before']:.3f} -> {summary['after']:.3f} on 40 held-out problems in "
    assert result in output
    assert (runs / "reward_curve.png").read_bytes().startswith(b"\x89PNG")
    assert [row["step"] for row in read_jsonl(runs / "grpo" / "metrics.jsonl")] == [1, 2]
    losses = [row["sft/loss"] for row in read_jsonl(runs / "sft" / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]

    output = run_demo(tmp_path, "--control", *few)
    more = int(re.search(r"control: (\d+) more supervised steps", output)[1])
    assert more > 0
    assert len(read_jsonl(runs / "control" / "metrics.jsonl")) == 30 + more
    assert f"control: accuracy {summary['before']:.3f} -> " in output
