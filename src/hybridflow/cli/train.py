"""Train by reinforcement learning: PPO with a critic, or GRPO, as the recipe says.

The run's directory (trainer.run_dir) holds config.toml, metrics.jsonl, samples.jsonl and checkpoints/; the same command
continues from the newest checkpoint there. Ctrl-C or SIGTERM finishes the step, saves and exits with status 0; a
second one exits at once, with status 130.
"""

import argparse

from hybridflow.cli.training import add_arguments as add_arguments
from hybridflow.cli.training import how_to_go_on as how_to_go_on
from hybridflow.cli.training import run_trainer


def run(args: argparse.Namespace) -> int:
    return run_trainer(args, "build_trainer")
