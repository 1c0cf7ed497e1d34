"""Choosing a checkpoint on the command line: its own directory, or a run and a step."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.cli.run_paths import absolute_paths
from hybridflow.errors import CheckpointConfigError, ConfigError

if TYPE_CHECKING:
    from hybridflow.checkpoint import Checkpoint


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """`--checkpoint DIR`, or `--run DIR` with `--step N`; none of them is the model of model.path as it is."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="use the weights of this checkpoints/step_...")
    source.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="use the weights of this run, and its config.toml (with paths from where it was started) if no RECIPE is "
        "given",
    )
    parser.add_argument("--step", type=int, metavar="N", help="with --run: of this step (default: the newest)")


def chosen_checkpoint(args: argparse.Namespace) -> "Checkpoint | None":
    """What `add_checkpoint_arguments` was given; None for nothing."""
    source = args.run or args.checkpoint
    if source is None and args.step is not None:
        raise ConfigError(f"--step {args.step} chooses among the checkpoints of a run; name the run with --run DIR.")
    return None if source is None else find_checkpoint(source, args.step)


def recipe_of_run(args: argparse.Namespace) -> Path | None:
    """The configuration that `--run` was last started with; None without `--run`."""
    if args.run is None:
        return None
    if not (file := args.run / "config.toml").is_file():
        raise ConfigError(f"'{file}' is missing, so '{args.run}' is not the directory of a run.")
    return file


def paths_of_run(args: argparse.Namespace) -> list[str]:
    """Return the overrides that make the paths of `--run`'s config.toml absolute; none if a RECIPE is given."""
    file = recipe_of_run(args)
    has_recipe = args.recipe is not None and "=" not in args.recipe
    return [] if file is None or has_recipe else absolute_paths(file)


def find_checkpoint(source: Path, step: int | None) -> "Checkpoint":
    """The checkpoint at `source`, or of the run at `source` the one of `step` (None: the newest)."""
    from hybridflow.checkpoint import CheckpointStore, open_checkpoint

    if (source / "checkpoint.json").exists():
        if step is not None:
            raise ConfigError(
                f"--step {step} chooses among the checkpoints of a run, but '{source}' is one; leave --step out."
            )
        return open_checkpoint(source.absolute())
    store = CheckpointStore((source / "checkpoints").absolute())
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise CheckpointConfigError(
            f"'{source}' is neither a checkpoint nor a run with checkpoints; '{store.directory}' has none."
        )
    return checkpoint
