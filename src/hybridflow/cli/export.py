"""Write the model of a run or of one checkpoint as a Hugging Face model directory."""

import argparse
from pathlib import Path

from hybridflow.cli.checkpoint_arguments import find_checkpoint
from hybridflow.config.run_paths import absolute_paths
from hybridflow.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the source, the directory to write and the form of the weights."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_DIR_OR_CHECKPOINT",
        help="directory of a run, or one of its checkpoints/step_...",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write; must not exist, or be empty")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="dtype of the weights (default: the one in the model's config.json; with --adapter the one they were "
        "trained in, float32 or float64)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="for a run with lora.rank: write only the adapters, for peft, instead of merging them into the weights",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="directory with the configuration and tokenizer (default: the run's model.path)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the model directory."""
    from hybridflow.checkpoint import export_model

    checkpoint = find_checkpoint(args.source, args.step)
    model_dir = args.model or _model_path(checkpoint.directory.parent.parent)
    dtype = export_model(checkpoint, model_dir, args.out, dtype=args.dtype, adapter=args.adapter)
    print(f"wrote {args.out} from {checkpoint.directory}, weights in {dtype} (--dtype chooses another)")
    return 0


def _model_path(run_dir: Path) -> Path:
    from hybridflow.config import load_config

    config_file = run_dir / "config.toml"
    if not config_file.is_file():
        raise ConfigError(
            f"'{config_file}' does not exist, so the initial model of the run is unknown; set it with --model DIR."
        )
    path = Path(load_config(config_file, absolute_paths(config_file)).model.path)
    if not path.is_dir():
        raise ConfigError(f"model.path='{path}' of '{config_file}' is not a directory here; set it with --model DIR.")
    return path
