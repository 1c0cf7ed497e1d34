"""The option `--stop-after N`."""

import argparse


def add_stop_after(parser: argparse.ArgumentParser) -> None:
    """Add `--stop-after N` to a command that trains."""
    parser.add_argument(
        "--stop-after",
        type=_step,
        metavar="N",
        help="save and exit after step N; learning-rate schedules still end at the last step of the run",
    )


def _step(text: str) -> int:
    try:
        step = int(text)
    except ValueError:
        step = 0
    if step < 1:
        raise argparse.ArgumentTypeError(f"N must be a positive integer, got {text!r}")
    return step
