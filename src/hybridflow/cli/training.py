"""Code that all training commands share: arguments, run, last line, hint for resuming."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.cli.arguments import add_recipe_arguments, add_stop_after, config_of
from hybridflow.runtime.stop_signals import signals_exit

if TYPE_CHECKING:
    from hybridflow.trainers import RunDirectory

GENERATE_AND_EXPORT = "hybridflow generate --run {run} --prompt TEXT, hybridflow export {run} DIR"
NEXT_COMMANDS = {
    "train": "hybridflow evaluate --run {run}, hybridflow export {run} DIR",
    "sft": GENERATE_AND_EXPORT,
    "dpo": GENERATE_AND_EXPORT,
    "reward-model": "hybridflow export {run} DIR, then reward.model_path=DIR in the recipe of hybridflow train",
}
"""Commands that use a checkpoint, by kind of run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe with its overrides, and `--stop-after`."""
    add_recipe_arguments(parser)
    add_stop_after(parser)


def run_trainer(args: argparse.Namespace, build: str) -> int:
    """Train with `hybridflow.trainers.<build>(config)`, print where the checkpoint is, and return the exit status."""
    config = config_of(args)
    from hybridflow.runtime.observe.slow_start import named_if_slow

    with named_if_slow("loading torch and transformers"), signals_exit():
        from hybridflow import trainers

        build_trainer = getattr(trainers, build)
    with build_trainer(config) as trainer:
        trainer.fit(args.stop_after)
    print(last_line(trainer.run))
    return 0


def last_line(run: "RunDirectory") -> str:
    """Return the path of the newest checkpoint of a run and the commands that use it, or say that there is none."""
    steps = run.store.list()
    if not steps:
        return f"no checkpoint was saved in {run.path}; the same command starts again"
    kind = run.identity["kind"]
    can_evaluate = kind != "train" or run.config.data.val_files
    commands = NEXT_COMMANDS[kind] if can_evaluate else GENERATE_AND_EXPORT
    return f"checkpoint: {run.store.path(steps[-1])}; next: {commands.format(run=shlex.quote(str(run.path)))}"


def how_to_go_on(args: argparse.Namespace) -> str:
    """Return the hint for an error after which the same command can be run again."""
    from hybridflow.checkpoint import CheckpointStore

    how = config_of(args).trainer
    steps = CheckpointStore(Path(how.run_dir) / "checkpoints").list()
    if not steps:
        return "The same command starts again: there is no checkpoint yet."
    command = "The same command" if how.resume == "auto" else "The same command with trainer.resume=auto"
    return f"{command} continues from the last checkpoint, that of step {steps[-1]}."
