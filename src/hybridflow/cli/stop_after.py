"""`--stop-after N`: a run in several sittings."""

import argparse


def add_stop_after(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stop-after",
        type=_step,
        metavar="N",
        help="save and exit after step N of the run; schedules still reach to the last step",
    )


def _step(text: str) -> int:
    try:
        step = int(text)
    except ValueError:
        step = 0
    if step < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no step; steps are 1, 2, ...")
    return step
