"""A small model with random weights learns countdown by reinforcement learning, in minutes on a CPU.

Everything is made on the spot in runs/countdown: problems, a tokenizer, a model of 2.6M weights. A supervised warm
start teaches the form of an answer; GRPO then teaches to search. Nothing is downloaded.
"""

import argparse
import runpy
import sys
from importlib.resources import files

OVERRIDES = {"--sft": "the warm start", "--grpo": "GRPO"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the comparison, and overrides of the two recipes."""
    parser.add_argument(
        "--control", action="store_true", help="more supervised training instead of GRPO; needs a finished demo"
    )
    for option, what in OVERRIDES.items():
        parser.add_argument(
            option, action="append", default=[], metavar="KEY=VALUE", help=f"override of the recipe of {what}"
        )


def run(args: argparse.Namespace) -> int:
    """Run the program of the demo in this process."""
    program = files("hybridflow").joinpath("examples", "countdown_demo.py")
    arguments = ["--control"] if args.control else []
    for option in OVERRIDES:
        for change in getattr(args, option.removeprefix("--")):
            arguments += [option, change]
    before, sys.path[:0] = list(sys.path), [str(files("hybridflow").joinpath("examples"))]
    sys.argv = [str(program), *arguments]
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.path[:] = before
    return 0
