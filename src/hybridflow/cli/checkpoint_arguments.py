"""Options that select a checkpoint: its directory, or a run and a step."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.cli.arguments import config_of
from hybridflow.config import Config
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


def config_and_checkpoint(args: argparse.Namespace, more: Sequence[str] = ()) -> tuple[Config, "Checkpoint | None"]:
    """Return the configuration, without a RECIPE that of `--run`, and the checkpoint; None without these options.

    `more`: overrides that apply before those of the arguments.
    """
    recipe, paths = None, []
    if args.run is not None:
        recipe = args.run / "config.toml"
        if not recipe.is_file():
            raise ConfigError(
                f"--run '{args.run}' is not the directory of a run: '{recipe}' does not exist. "
                "Give the trainer.run_dir of a run of `hybridflow train`, `sft`, `dpo` or `reward-model`."
            )
        if args.recipe is None or "=" in args.recipe:
            paths = absolute_paths(recipe)
    config, source = config_of(args, default_recipe=recipe, more=[*paths, *more]), args.run or args.checkpoint
    if source is None and args.step is not None:
        raise ConfigError(f"--step {args.step} needs a run; add --run DIR.")
    return config, None if source is None else find_checkpoint(source, args.step)


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
