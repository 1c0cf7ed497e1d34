"""Countdown with each `trainer.lag`: does a run on older samples learn as much, with a correction and without?

The warm start of the demo is trained once; GRPO of the demo then runs from it with every lag and seed, in one process,
since what a lag means does not depend on where it runs.

  lag_0, lag_1, lag_4     importance weights of each token, truncated at 2 (algorithm.rollout_weights = "token")
  lag_4_without           the same with all weights truncated to 1, so that nothing corrects for the older samples

The figures are the greedy accuracy on held-out problems after the last step, by seed; the ratio compares the mean with
that of the first row.
"""

import logging
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from support.arguments import names_in, parser_of, positive
from support.environments import ROOT
from support.program import INTERRUPTED, run
from support.report import Row, print_rows, print_table

from hybridflow.checkpoint import CheckpointStore, export_model
from hybridflow.config import Config, load_config
from hybridflow.observability import read_jsonl
from hybridflow.trainers import OfflineTrainer, PPOTrainer, build_sft_trainer, build_trainer

CORRECTED = ("algorithm.rollout_weights=token", "algorithm.rollout_weight_outside=truncate")
UNIT_WEIGHTS = "algorithm.rollout_weight_bounds=[1.0, 1.0]"
ROWS = {
    "lag_0": ("trainer.lag=0", *CORRECTED),
    "lag_1": ("trainer.lag=1", *CORRECTED),
    "lag_4": ("trainer.lag=4", *CORRECTED),
    "lag_4_without": ("trainer.lag=4", *CORRECTED, UNIT_WEIGHTS),
}


def main() -> None:
    smoke = {"seeds": 1, "steps": 2, "sft_steps": 2, "problems": 8, "only": ("lag_0", "lag_1")}
    parser = parser_of(__doc__, None, smoke={**smoke, "changes": ["data.train_batch_size=4", "rollout.group_size=2"]})
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of each row (default: 3)")
    parser.add_argument("--steps", type=positive, default=60, metavar="N", help="steps of GRPO (default: 60)")
    parser.add_argument("--sft-steps", type=positive, default=700, metavar="N", help="of the warm start (default: 700)")
    parser.add_argument("--problems", type=positive, default=512, metavar="N", help="for validation (default: 512)")
    parser.add_argument("--only", type=names_in(list(ROWS)), default=tuple(ROWS), metavar="ROW,...", help="these rows")
    parser.set_defaults(changes=[])
    args = parser.parse_args()
    logging.disable(logging.INFO)
    accuracies: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        common = [f"controller.threads={args.threads or 0}"]
        write_task(directory, args.sft_steps, args.problems)
        warm_start(directory, [*common, f"trainer.total_steps={args.sft_steps}"])
        for name in args.only:
            start = time.perf_counter()
            changes = [*common, *ROWS[name], *args.changes, f"trainer.total_steps={args.steps}"]
            accuracies[name] = [reinforce(directory, f"{name}_{seed}", seed, changes) for seed in range(args.seeds)]
            print(f"{name}: {accuracies[name]} in {time.perf_counter() - start:.0f} s", flush=True)
    means = {name: statistics.mean(of_seeds) for name, of_seeds in accuracies.items()}
    first = means[args.only[0]]
    print_table(
        f"greedy accuracy after {args.steps} steps",
        ("", *(f"seed {seed}" for seed in range(args.seeds)), "mean"),
        [(name, *(f"{value:.3f}" for value in (*accuracies[name], means[name]))) for name in accuracies],
    )
    rows = [
        Row(name, "accuracy", mean, peer=first, ratio=mean / first if first else None) for name, mean in means.items()
    ]
    rows += [
        Row(f"{name}_seed_{seed}", "accuracy", value)
        for name, of_seeds in accuracies.items()
        for seed, value in enumerate(of_seeds)
    ]
    print_rows("lag_learning", rows, smoke=args.smoke)


def write_task(directory: Path, sft_steps: int, problems: int) -> None:
    """Write the demo's data, one demonstration for each row of the warm start, tokenizer and random model."""
    task = runpy.run_path(str(ROOT / "examples" / "countdown_task.py"))
    task["write_data"](directory / "data", num_examples=64 * sft_steps, num_train=8_000, num_test=problems, seed=0)
    task["write_model"](directory / "model", seed=0)


def warm_start(directory: Path, changes: Sequence[str]) -> None:
    """Train the warm start and export it."""
    train(build_sft_trainer, configured("countdown_sft", directory, "sft", changes))
    checkpoint = CheckpointStore(directory / "sft" / "checkpoints").latest()
    assert checkpoint is not None
    export_model(checkpoint.directory, directory / "model", directory / "warm_start")


def reinforce(directory: Path, name: str, seed: int, changes: Sequence[str]) -> float:
    """Train with GRPO from the warm start and return the accuracy after the last step."""
    seeded = [*changes, f"trainer.seed={seed}", "trainer.val_every=0", "trainer.val_before_train=false"]
    train(build_trainer, configured("countdown_grpo", directory, name, seeded))
    return read_jsonl(directory / name / "metrics.jsonl")[-1]["val/accuracy"]


def configured(recipe: str, directory: Path, name: str, changes: Sequence[str]) -> Config:
    """Return the demo's recipe with its files in `directory` and the run in the folder `name` of it."""
    text = (ROOT / "recipes" / f"{recipe}.toml").read_text().replace("runs/countdown/", f"{directory}/")
    path = directory / f"{name}.toml"
    path.write_text(text)
    return load_config(path, [*changes, f"trainer.run_dir={directory}/{name}"])


def train(build: Callable[[Config], OfflineTrainer | PPOTrainer], config: Config) -> None:
    """Train to the last step without output; on SIGINT `fit` finishes its step and returns."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), build(config) as trainer:
        trainer.fit()
        if trainer.global_step < trainer.total_steps:
            sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run(main)
