"""Score a model on the validation data (data.val_files) and print its metrics.

Without --checkpoint or --run it is the model of model.path. `validation.*` says how: by default one greedy response for
each prompt; with validation.group_size=8 validation.temperature=1 also pass@1 to pass@8.
"""

import argparse

from hybridflow.cli.checkpoint_arguments import (
    add_checkpoint_arguments,
    chosen_checkpoint,
    paths_of_run,
    recipe_of_run,
)
from hybridflow.cli.output_file import add_output, write_rows
from hybridflow.cli.recipe_arguments import add_recipe_arguments, config_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_checkpoint_arguments(parser)
    add_output(parser, "every sample with its score")


def run(args: argparse.Namespace) -> int:
    config = config_of(args, default_recipe=recipe_of_run(args), more=paths_of_run(args))
    checkpoint = chosen_checkpoint(args)
    from hybridflow.trainers import build_validator

    with build_validator(config, checkpoint) as validator:
        metrics, samples = validator.run()
    width = max(map(len, metrics))
    for name, value in sorted(metrics.items()):
        print(f"{name:<{width}}  {value:.4f}")
    if args.output:
        write_rows(args.output, samples)
    return 0
