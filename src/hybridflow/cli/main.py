"""Names the commands, runs one of them, and turns errors made for people into one line on stderr.

A command is a module with `add_arguments(parser)` and `run(args) -> int`; its docstring is its help.
Nothing heavy is imported before the command is known, so that `hybridflow --help` is instant.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from hybridflow import __version__
from hybridflow.errors import HybridFlowError, WorkerError


class Command(NamedTuple):
    """Where a command lives, what it does, how it is called."""

    module: str
    help: str
    example: str


COMMANDS = {
    "prepare": Command(
        "hybridflow.cli.prepare", "write a data set as parquet", "prepare countdown --output-dir data/countdown"
    ),
    "sft": Command("hybridflow.cli.sft", "train on given responses", "sft recipes/countdown_sft.toml"),
    "dpo": Command("hybridflow.cli.dpo", "train on preferences by DPO or IPO", "dpo recipes/rlhf/dpo.toml"),
    "reward-model": Command(
        "hybridflow.cli.reward_model",
        "train a reward model on preferences",
        "reward-model recipes/rlhf/reward_model.toml",
    ),
    "train": Command(
        "hybridflow.cli.train",
        "train by reinforcement learning",
        "train recipes/countdown_grpo.toml actor.optimizer.lr=1e-5",
    ),
    "generate": Command(
        "hybridflow.cli.generate",
        "write responses to prompts",
        'generate recipes/countdown_grpo.toml --prompt "12 5 3 => 10 :"',
    ),
    "evaluate": Command(
        "hybridflow.cli.evaluate", "score a model on the validation data", "evaluate --run runs/countdown/grpo"
    ),
    "export": Command(
        "hybridflow.cli.export", "save a checkpoint as a Hugging Face model", "export runs/countdown/grpo exported/"
    ),
    "graph": Command("hybridflow.cli.graph", "show a recipe's dataflow", "graph recipes/countdown_ppo.toml"),
    "config": Command(
        "hybridflow.cli.config", "show a run's configuration, or every key", "config recipes/countdown_grpo.toml"
    ),
}

USAGE_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hybridflow ARGV...`; returns the exit status: 0, 2 for an error of ours, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except HybridFlowError as error:
        if isinstance(error, WorkerError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # a worker fell over something nobody foresaw
        print(f"error: {error}", file=sys.stderr)
        if os.environ.get("HYBRIDFLOW_LOGGING_LEVEL", "").lower() == "debug":
            from hybridflow.observability.log import get_logger

            get_logger(__name__).debug("where it was raised:", exc_info=error)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of `hybridflow config --reference | head` has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    name = next((a for a in arguments if not a.startswith("-")), None)
    parser = _main_parser()
    if name is None or arguments[0] != name:
        parser.parse_args(arguments)  # --help and --version leave here, as does an option nobody knows
        parser.print_help()
        return USAGE_ERROR
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(COMMANDS)}."
        parser.error(f"no such command: {name}; {hint}")
    command = COMMANDS[name]
    module = import_module(command.module)
    command_parser = argparse.ArgumentParser(
        prog=f"hybridflow {name}",
        description=module.__doc__,
        epilog=f"example: hybridflow {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(command_parser)
    return module.run(_parse(command_parser, arguments[1:]))


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Options may stand anywhere between the changes to a recipe, except where a command has commands of its own."""
    has_commands = any(action.nargs == argparse.PARSER for action in parser._actions)
    return parser.parse_args(arguments) if has_commands else parser.parse_intermixed_args(arguments)


def _main_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    examples = "\n".join(f"  hybridflow {command.example}" for command in COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog="hybridflow",
        usage="hybridflow COMMAND ...",
        description="Reinforcement-learning post-training of language models.\n\ncommands:\n" + listed,
        epilog=f"examples:\n{examples}\n\n`hybridflow COMMAND --help` explains one. Recipes are TOML files; "
        "a.b=c after one changes a key.\nHYBRIDFLOW_LOGGING_LEVEL=debug shows more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hybridflow {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
