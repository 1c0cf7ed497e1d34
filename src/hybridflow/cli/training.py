"""What every command that trains has in common: its arguments, the trainer that it builds and runs, its resumption."""

import argparse
from pathlib import Path

from hybridflow.cli.recipe_arguments import add_recipe_arguments, config_of
from hybridflow.cli.stop_after import add_stop_after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A recipe with its overrides, and where to stop."""
    add_recipe_arguments(parser)
    add_stop_after(parser)


def run_trainer(args: argparse.Namespace, build: str) -> int:
    """Train with what `hybridflow.trainers` has under the name `build`, once the configuration is known to be right."""
    config = config_of(args)
    from hybridflow import trainers

    with getattr(trainers, build)(config) as trainer:
        trainer.fit(args.stop_after)
    return 0


def how_to_go_on(args: argparse.Namespace) -> str:
    """What the same command does after an error that may not come again."""
    from hybridflow.checkpoint import CheckpointStore

    how = config_of(args).trainer
    steps = CheckpointStore(Path(how.run_dir) / "checkpoints").list()
    if not steps:
        return "The same command starts again: there is no checkpoint yet."
    command = "The same command" if how.resume == "auto" else "The same command with trainer.resume=auto"
    return f"{command} continues from the last checkpoint, that of step {steps[-1]}."
