"""Command-line arguments that benchmarks share."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class _Settings(argparse.Action):
    """A flag that also sets other arguments; those given after it override them."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Mapping[str, Any], **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, default=False, **options)

    def __call__(self, parser: Any, namespace: argparse.Namespace, *_: Any) -> None:
        vars(namespace).update(self.const, **{self.dest: True})


def parser_of(
    doc: str | None,
    repeats: int | None = 5,
    *,
    smoke: Mapping[str, Any],
    full: Mapping[str, Any] | None = None,
    skipped: str = "",
) -> argparse.ArgumentParser:
    """Build a parser with `--smoke`, `--repeats` and `--threads`, described by a module's docstring.

    `repeats` is the default of `--repeats`; None leaves the argument out. `--smoke` sets the
    arguments in `smoke`, and `threads` to 1: a small task on a busy machine would mostly wait for its other threads.
    With `full`, the defaults end within five minutes, and `--full` sets these arguments: `skipped` says what it adds.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--smoke",
        action=_Settings,
        const={"threads": 1, **smoke},
        help="check in seconds that the benchmark runs: only hybridflow's side, tiny sizes, figures without meaning",
    )
    if full is not None:
        parser.add_argument("--full", action=_Settings, const=full, help=f"the whole table: also {skipped}")
        parser.set_defaults(skipped=skipped)
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of a side (default: the physical cores)")
    if repeats is not None:
        parser.add_argument(
            "--repeats",
            type=positive,
            default=repeats,
            metavar="N",
            help=f"measurements of each side, after one warm-up; medians are compared (default: {repeats})",
        )
    return parser


def print_skipped(args: argparse.Namespace) -> None:
    """Print what the defaults of this benchmark leave out."""
    if not (args.full or args.smoke):
        print(f"skipped: {args.skipped}; ARGS=--full runs the whole table", flush=True)


def positive(text: str) -> int:
    """Read a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is invalid: expected an integer of 1 or more.")
    return int(text)


def names_in(valid: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Build a reader of comma-separated names, each one of `valid`."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        if unknown := [name for name in names if name not in valid]:
            raise argparse.ArgumentTypeError(f"'{unknown[0]}' is unknown; use some of {', '.join(valid)}.")
        return names

    return read
