"""Command-line arguments that benchmarks share."""

import argparse
from collections.abc import Callable, Sequence


def parser_of(doc: str | None, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with `--repeats`, described by a module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats",
        type=_positive,
        default=repeats,
        metavar="N",
        help=f"measurements of each side, after one that warms it up; medians are compared (default: {repeats})",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of repeats; use 1 or more.")
    return int(text)


def names_in(valid: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A reader of comma-separated names, each one of `valid`."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        if unknown := [name for name in names if name not in valid]:
            raise argparse.ArgumentTypeError(f"'{unknown[0]}' is unknown; use some of {', '.join(valid)}.")
        return names

    return read
