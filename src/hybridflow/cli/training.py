"""What every command that trains has in common: its arguments, and the trainer that it builds and runs."""

import argparse

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
