"""`hybridflow export`: the policy of a run or of one checkpoint as a Hugging Face model directory."""

import argparse
from pathlib import Path

from hybridflow.cli.checkpoint_arguments import find_checkpoint
from hybridflow.cli.run_paths import absolute_paths
from hybridflow.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="RUN_DIR_OR_CHECKPOINT",
        help="a run's directory, or one of its checkpoints/step_...",
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="the directory to write; it may not exist yet, or be empty"
    )
    parser.add_argument("--step", type=int, help="which checkpoint of the run (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="dtype of the weights (default: the one in the model's config.json; with --adapter the one they were "
        "trained in, float32 or float64)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of a run with lora.rank alone, for peft, instead of merging them into the weights",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="where configuration and tokenizer come from (default: the run's model.path)",
    )


def run(args: argparse.Namespace) -> int:
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
            f"'{config_file}' is missing, so the model that training started from is unknown; name it with --model DIR."
        )
    path = Path(load_config(config_file, absolute_paths(config_file)).model.path)
    if not path.is_dir():
        raise ConfigError(
            f"model.path='{path}' of '{config_file}' is not a directory here; name the model's directory with "
            "--model DIR."
        )
    return path
