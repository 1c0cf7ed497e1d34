"""Runs of the demo's task, countdown, in a directory of a benchmark."""

import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import CheckpointStore, export_model
from hybridflow.config import Config, load_config
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import OfflineTrainer, PPOTrainer, build_sft_trainer, build_trainer
from support.environments import ROOT
from support.program import INTERRUPTED


def write_task(directory: Path, sft_steps: int, problems: int) -> None:
    """Write the demo's data, one demonstration for each row of the warm start, tokenizer and random model."""
    task = runpy.run_path(str(ROOT / "examples" / "countdown_task.py"))
    task["write_data"](directory / "data", num_examples=64 * sft_steps, num_train=8_000, num_test=problems, seed=0)
    task["write_model"](directory / "model", seed=0)


def warm_start(directory: Path, changes: Sequence[str]) -> None:
    """Train the warm start and export it."""
    _train(build_sft_trainer, configured("countdown_sft", directory, "sft", changes))
    checkpoint = CheckpointStore(directory / "sft" / "checkpoints").latest()
    assert checkpoint is not None
    export_model(checkpoint.directory, directory / "model", directory / "warm_start")


def reinforce(directory: Path, name: str, seed: int, changes: Sequence[str]) -> list[dict[str, Any]]:
    """Train with GRPO from the warm start, with validation after the last step only; return the metrics of each."""
    seeded = ["trainer.val_every=0", "trainer.val_before_train=false", *changes, f"trainer.seed={seed}"]
    _train(build_trainer, configured("countdown_grpo", directory, name, seeded))
    return read_jsonl(directory / name / "metrics.jsonl")


def configured(recipe: str, directory: Path, name: str, changes: Sequence[str]) -> Config:
    """Return the demo's recipe with its files in `directory` and the run in the folder `name` of it."""
    text = (ROOT / "recipes" / f"{recipe}.toml").read_text().replace("runs/countdown/", f"{directory}/")
    path = directory / f"{name}.toml"
    path.write_text(text)
    return load_config(path, [*changes, f"trainer.run_dir={directory}/{name}"])


def _train(build: Callable[[Config], OfflineTrainer | PPOTrainer], config: Config) -> None:
    """Train to the last step without output; on SIGINT `fit` finishes its step and returns."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), build(config) as trainer:
        trainer.fit()
        if trainer.global_step < trainer.total_steps:
            sys.exit(INTERRUPTED)
