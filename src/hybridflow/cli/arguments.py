"""Arguments that several commands have: `RECIPE ... [section.key=value ...]`, `--stop-after`, `--steps`, `--port`."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hybridflow.config import Config, load_config

N = TypeVar("N", int, float)


def number(kind: type[N], is_valid: Callable[[N], bool], expected: str) -> Callable[[str], N]:
    """Return the type of an argument that is such a number; for others the error says what was expected."""

    def read(text: str) -> N:
        with suppress(ValueError):
            if (kind is float or text.isdecimal()) and is_valid(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"'{text}' is invalid: expected {expected}")

    return read


port_number = number(int, lambda port: port <= 65535, "a port from 0 to 65535; 0 takes a free one")


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add recipes and overrides to a command."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="TOML file, or the name of an algorithm's recipe, such as dapo; of several, later ones override earlier "
        "ones; without one, the defaults",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="overrides of the recipe"
    )  # or more recipes


def config_of(
    args: argparse.Namespace,
    *,
    default_recipe: Path | None = None,
    more: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Config:
    """Return the configuration of the arguments, with overrides that apply before those of the arguments, and after."""
    arguments = [argument for argument in (args.recipe, *args.overrides) if argument is not None]
    recipes: list[str | Path] = []
    while arguments and "=" not in arguments[0]:
        recipes.append(arguments.pop(0))
    return load_config(recipes or default_recipe, [*more, *arguments, *after])


def add_stop_after(parser: argparse.ArgumentParser) -> None:
    """Add `--stop-after N` to a command that trains."""
    parser.add_argument(
        "--stop-after",
        type=number(int, lambda step: step > 0, "a positive integer"),
        metavar="N",
        help="save and exit after step N; learning-rate schedules still end at the last step of the run",
    )


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
