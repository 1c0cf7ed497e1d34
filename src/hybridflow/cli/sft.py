"""Train on given responses: parquet files with `prompt` and `response`.

The run's directory (trainer.run_dir) holds config.toml, metrics.jsonl and checkpoints/; the same command continues
from the newest checkpoint there. Ctrl-C or SIGTERM finishes the step, saves and exits with status 0; a second one
exits at once. `hybridflow export` makes a model directory of the result.
"""

import argparse

from hybridflow.cli.recipe_arguments import add_recipe_arguments, config_of
from hybridflow.cli.stop_after import add_stop_after


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_stop_after(parser)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    from hybridflow.trainers import build_sft_trainer

    with build_sft_trainer(config) as trainer:
        trainer.fit(args.stop_after)
    return 0
