"""The option `--steps FIRST-LAST`: some steps of a run."""

import argparse


def add_steps(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--steps FIRST-LAST`; `default` names the steps without it in its help."""
    help_text = f"steps to report (default: {default})"
    parser.add_argument("--steps", type=_steps, metavar="FIRST-LAST", help=help_text)


def _steps(text: str) -> range:
    first, dash, last = text.partition("-")
    if first.isdecimal() and (last.isdecimal() if dash else True):
        steps = range(int(first), int(last or first) + 1)
        if steps:
            return steps
    raise argparse.ArgumentTypeError(f"'{text}' is invalid: expected a step or FIRST-LAST, such as 10-20")
