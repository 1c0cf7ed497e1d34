"""Write the model of a run or of one checkpoint as a Hugging Face model directory."""

import argparse
from pathlib import Path

from hybridflow.cli.checkpoint_arguments import find_checkpoint
from hybridflow.config import load_config
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
        metavar="DIR",
        help="directory with the configuration and tokenizer (default: the run's model.path)",
    )
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="also write this certificate.json of `hybridflow certify`, of the same recipe, model and data",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="OWNER/NAME",
        help="also upload the directory to this repository of the Hugging Face hub, which is created if it is missing",
    )
    parser.add_argument("--private", action="store_true", help="with --push-to-hub: make a new repository private")


def run(args: argparse.Namespace) -> int:
    """Write the model directory."""
    from hybridflow.checkpoint import export_model
    from hybridflow.checkpoint.certificate import read_certificate
    from hybridflow.models.hub import local_model, require_upload, upload_model

    if args.private and args.push_to_hub is None:
        raise ConfigError("--private needs --push-to-hub OWNER/NAME.")
    certificate = read_certificate(args.certificate) if args.certificate else None
    checkpoint = find_checkpoint(args.source, args.step)
    model_dir = local_model("--model", args.model) if args.model else _model_path(checkpoint.directory.parent.parent)
    if args.push_to_hub is not None:
        require_upload(args.push_to_hub, private=args.private)
    template = trained_chat_template(checkpoint.directory.parent.parent)
    dtype = export_model(
        checkpoint,
        model_dir,
        args.out,
        dtype=args.dtype,
        adapter=args.adapter,
        chat_template=template,
        certificate=certificate,
    )
    print(f"wrote {args.out} from {checkpoint.directory}, weights in {dtype} (--dtype chooses another)")
    if args.push_to_hub is not None:
        print(f"uploading {args.out} to {args.push_to_hub} ...", flush=True)
        print(f"uploaded: {upload_model(args.out, args.push_to_hub)}")
    return 0


def trained_chat_template(run_dir: Path) -> str:
    """Return the text of model.chat_template with which a run has trained; "" without one."""
    file = run_dir / "config.toml"
    return load_config(file, absolute_paths(file)).model.chat_template if file.is_file() else ""


def _model_path(run_dir: Path) -> Path:
    config_file = run_dir / "config.toml"
    if not config_file.is_file():
        raise ConfigError(
            f"'{config_file}' does not exist, so the initial model of the run is unknown; set it with --model DIR."
        )
    from hybridflow.models.hub import local_model

    path = local_model("model.path", load_config(config_file, absolute_paths(config_file)).model.path)
    if not path.is_dir():
        raise ConfigError(f"model.path='{path}' of '{config_file}' is not a directory here; set it with --model DIR.")
    return path
