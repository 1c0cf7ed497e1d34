"""Every recipe of an algorithm on a small task, from random weights: does it learn?

The task: a number goes in, the same number is to come out, first of up to four words. A model of 30,000 weights learns
it in some seconds. Each recipe of recipes/algorithms runs for every seed; the table shows the mean score of the first
and of the last five steps over the seeds, and how far the seeds are apart.
"""

import argparse
import json
import logging
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from support.arguments import names_in
from support.errors import BenchmarkError
from support.report import print_table

from hybridflow.checkpoint import CheckpointStore, export_model
from hybridflow.config import load_config
from hybridflow.data import prompt_row, write_prompt_file
from hybridflow.observability import read_jsonl
from hybridflow.trainers import build_trainer

ROOT = Path(__file__).parents[1]
OVERLAYS = {path.stem: path for path in sorted((ROOT / "recipes" / "algorithms").glob("*.toml"))}
NUMBERS, STEPS, LAST = 12, 60, 5
LEARNED = 0.3
"""How much better the last steps must be than the first ones."""

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
FITTING = {
    "reinforce_plus_plus": ONE_RESPONSE,
    "remax": [*ONE_RESPONSE, "trainer.total_steps=120"],  # one response a prompt and one optimizer step a batch
    "ppo": [*ONE_RESPONSE, "actor.mini_batch_size=96", "critic.mini_batch_size=96"],
    "dapo": ["reward.overlong_buffer=2", "reward.overlong_penalty=0.1"],
    "gdpo": ["reward.function={directory}/reward.py:score"],
    **{name: ["teacher.model_path={directory}/teacher"] for name in DISTILLATION},
}
"""What recipes that are written for countdown need for this task."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each recipe (default: 3)")
    parser.add_argument(
        "--only", type=names_in(list(OVERLAYS)), default=tuple(OVERLAYS), metavar="RECIPE,...", help="these recipes"
    )
    args = parser.parse_args()
    logging.disable(logging.INFO)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        write_task(Path(directory))
        if set(DISTILLATION) & set(args.only):
            write_teacher(Path(directory))
        for name in args.only:
            start = time.perf_counter()
            curves = [curve_of(Path(directory), name, seed) for seed in range(args.seeds)]
            first, last = ([statistics.mean(part) for part in parts] for parts in zip(*map(ends, curves), strict=True))
            before, after, spread = statistics.mean(first), statistics.mean(last), max(last) - min(last)
            rows.append({"name": name, "first": before, "last": after, "spread": spread})
            print(f"{name}: {before:.3f} -> {after:.3f} in {time.perf_counter() - start:.0f} s", flush=True)
    header = ("recipe", "first steps", "last steps", "spread of seeds")
    lines = [(row["name"], *(f"{row[key]:.3f}" for key in ("first", "last", "spread"))) for row in rows]
    print_table(f"mean score, {args.seeds} seeds, {STEPS} steps", header, lines)
    print(json.dumps({"benchmark": "learn", "rows": rows}))
    if failed := [row["name"] for row in rows if not row["last"] - row["first"] >= LEARNED]:
        raise BenchmarkError(f"these did not learn: {', '.join(failed)}")


def write_task(directory: Path) -> None:
    """Model, prompts, reward and recipe."""
    task = runpy.run_path(str(ROOT / "examples" / "countdown_task.py"))
    task["write_model"](directory / "model", seed=0, width=32, layers=2, heads=2)
    rows = [
        prompt_row(data_source="echo", prompt=str(number), ground_truth=str(number), split="train", index=index)
        for index, number in enumerate(numbers(384))
    ]
    write_prompt_file(directory / "train.parquet", rows)
    (directory / "reward.py").write_text(REWARD)
    (directory / "task.toml").write_text(TASK.replace("{directory}", str(directory)))


def write_teacher(directory: Path) -> None:
    """What GRPO makes of the model, as a model of its own."""
    curve_of(directory, "grpo", seed=0)
    checkpoint = CheckpointStore(directory / "grpo_0" / "checkpoints").latest()
    assert checkpoint is not None
    export_model(checkpoint, directory / "model", directory / "teacher")
    shutil.rmtree(directory / "grpo_0")


def numbers(count: int) -> list[int]:
    return [1 + index % NUMBERS for index in range(count)]


def curve_of(directory: Path, name: str, seed: int) -> list[float]:
    """The mean score of each step."""
    run = directory / f"{name}_{seed}"
    changes = [change.replace("{directory}", str(directory)) for change in FITTING.get(name, [])]
    config = load_config(
        [directory / "task.toml", OVERLAYS[name]],
        [f"trainer.seed={seed}", f"trainer.total_steps={STEPS}", f"trainer.run_dir={run}", *changes],
    )
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), build_trainer(config) as trainer:
        trainer.fit()
    return [row["critic/score/mean"] for row in read_jsonl(run / "metrics.jsonl")]


def ends(curve: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    return curve[:LAST], curve[-LAST:]


if __name__ == "__main__":
    try:
        main()
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
