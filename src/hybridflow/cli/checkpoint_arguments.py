"""Options that select a checkpoint: its directory, or a run and a step."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config.run_paths import absolute_paths
from hybridflow.errors import CheckpointConfigError, ConfigError

if TYPE_CHECKING:
    from hybridflow.checkpoint import Checkpoint


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--checkpoint DIR`, and `--run DIR` with `--step N`; without them the model of model.path is used."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help="use the weights of this checkpoints/step_...")
    source.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="use the weights of this run, and its config.toml (with paths from where it was started) if no RECIPE is "
        "given",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="with --run: step of the checkpoint (default: the newest)"
    )


def chosen_checkpoint(args: argparse.Namespace) -> "Checkpoint | None":
    """Return the checkpoint that the options select; None without `--run` and `--checkpoint`."""
    source = args.run or args.checkpoint
    if source is None and args.step is not None:
        raise ConfigError(f"--step {args.step} needs a run; add --run DIR.")
    return None if source is None else find_checkpoint(source, args.step)


def recipe_of_run(args: argparse.Namespace) -> Path | None:
    """Return the config.toml of `--run`, the configuration of its last start; None without `--run`."""
    if args.run is None:
        return None
    if not (file := args.run / "config.toml").is_file():
        raise ConfigError(
            f"--run '{args.run}' is not the directory of a run: '{file}' does not exist. "
            "Give the trainer.run_dir of a run of `hybridflow train`, `sft`, `dpo` or `reward-model`."
        )
    return file


def paths_of_run(args: argparse.Namespace) -> list[str]:
    """Return the overrides that make the paths of `--run`'s config.toml absolute; none if a RECIPE is given."""
    file = recipe_of_run(args)
    has_recipe = args.recipe is not None and "=" not in args.recipe
    return [] if file is None or has_recipe else absolute_paths(file)


def find_checkpoint(source: Path, step: int | None) -> "Checkpoint":
    """Return the checkpoint at `source`; if `source` is a run, its checkpoint of `step` (None: the newest)."""
    from hybridflow.checkpoint import CheckpointStore, open_checkpoint

    if (source / "checkpoint.json").exists():
        if step is not None:
            raise ConfigError(
                f"--step {step} needs the directory of a run, but '{source}' is a checkpoint; remove --step."
            )
        return open_checkpoint(source.absolute())
    store = CheckpointStore((source / "checkpoints").absolute())
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise CheckpointConfigError(
            f"'{source}' is neither a checkpoint nor a run with checkpoints: there are none in '{store.directory}'."
        )
    return checkpoint
