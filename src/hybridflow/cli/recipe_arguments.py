"""The arguments of every command that works on a recipe: `RECIPE [section.key=value ...]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hybridflow.config import Config, load_config


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a TOML file; without one the defaults (a first argument with = is a change)",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")


def config_of(args: argparse.Namespace, *, default_recipe: Path | None = None, more: Sequence[str] = ()) -> Config:
    """The configuration that the arguments ask for; `more` are overrides that come first."""
    arguments = [argument for argument in (args.recipe, *args.overrides) if argument is not None]
    recipe = arguments.pop(0) if arguments and "=" not in arguments[0] else default_recipe
    return load_config(recipe, [*more, *arguments])
