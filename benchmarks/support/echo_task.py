"""A small task that every algorithm can learn from random weights: repeat the number in the prompt.

The first of up to four response words must be the number of the prompt. A model of 30,000 weights learns it in seconds.
"""

import runpy
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from hybridflow.checkpoint import CheckpointStore, export_model
from hybridflow.config import load_config
from hybridflow.data import prompt_row, write_prompt_file
from hybridflow.runtime.observe import read_jsonl
from hybridflow.trainers import build_trainer
from support.environments import ROOT
from support.program import INTERRUPTED

OVERLAYS = {path.stem: path for path in sorted((ROOT / "recipes" / "algorithms").glob("*.toml"))}
NUMBERS, STEPS = 12, 60

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    words = solution_str.split()
    return {"score": float(words[:1] == [ground_truth]), "format": float(words[:1] != [] and words[0].isdigit())}
"""

TASK = """
[model]
path = "{directory}/model"

[data]
train_files = ["{directory}/train.parquet"]
train_batch_size = 64
max_prompt_length = 4
max_response_length = 4

[rollout]
group_size = 8

[reward]
function = "{directory}/reward.py:score"
processes = 0

[actor.optimizer]
lr = 3e-3
weight_decay = 0.0

[critic.optimizer]
lr = 1e-2
weight_decay = 0.0

[trainer]
val_before_train = false
log_samples = 0
keep_checkpoints = 1
"""

ONE_RESPONSE = ["data.train_batch_size=384"]
DISTILLATION = ("distillation", "distillation_forward_kl", "distillation_reverse_kl")
OVERRIDES = {
    "reinforce_plus_plus": ONE_RESPONSE,
    "remax": [*ONE_RESPONSE, "trainer.total_steps=120"],  # one response per prompt and one optimizer step per batch
    "ppo": [*ONE_RESPONSE, "actor.mini_batch_size=96", "critic.mini_batch_size=96"],
    "dapo": ["reward.overlong_buffer=2", "reward.overlong_penalty=0.1"],
    "gdpo": ["reward.function={directory}/reward.py:score"],
    **{name: ["teacher.model_path={directory}/teacher"] for name in DISTILLATION},
}
"""Changes that recipes written for countdown need for this task."""


def write_task(directory: Path) -> None:
    """Write model, prompts, reward and recipe."""
    task = runpy.run_path(str(ROOT / "examples" / "countdown_task.py"))
    task["write_model"](directory / "model", seed=0, width=32, layers=2, heads=2)
    rows = [
        prompt_row(data_source="echo", prompt=str(number), ground_truth=str(number), split="train", index=index)
        for index, number in enumerate(1 + index % NUMBERS for index in range(384))
    ]
    write_prompt_file(directory / "train.parquet", rows)
    (directory / "reward.py").write_text(REWARD)
    (directory / "task.toml").write_text(TASK.replace("{directory}", str(directory)))


def write_teacher(directory: Path) -> None:
    """Train the model with GRPO and export the result as `teacher`."""
    run = train(directory, "grpo", seed=0)
    checkpoint = CheckpointStore(run / "checkpoints").latest()
    assert checkpoint is not None
    export_model(checkpoint, directory / "model", directory / "teacher")
    shutil.rmtree(run)


def train(directory: Path, name: str, seed: int, changes: Sequence[str] = ()) -> Path:
    """Train on the task in `directory` with a recipe of recipes/algorithms; return the run directory."""
    run = directory / f"{name}_{seed}"
    overrides = [change.replace("{directory}", str(directory)) for change in OVERRIDES.get(name, [])]
    config = load_config(
        [directory / "task.toml", OVERLAYS[name]],
        [f"trainer.seed={seed}", f"trainer.total_steps={STEPS}", f"trainer.run_dir={run}", *overrides, *changes],
    )
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), build_trainer(config) as trainer:
        trainer.fit()
        if trainer.global_step < trainer.total_steps:  # on SIGINT, `fit` finishes its step and returns
            sys.exit(INTERRUPTED)
    return run


def mean_scores(run: Path) -> list[float]:
    """Return the mean score of each step of a run."""
    return [row["critic/score/mean"] for row in read_jsonl(run / "metrics.jsonl")]
