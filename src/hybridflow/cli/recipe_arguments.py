"""The arguments of every command that works on a recipe: `RECIPE ... [section.key=value ...]`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hybridflow.config import Config, load_config


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a TOML file, or several, of which the later ones have the last word; without one the defaults",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")  # or recipes


def config_of(args: argparse.Namespace, *, default_recipe: Path | None = None, more: Sequence[str] = ()) -> Config:
    """The configuration that the arguments ask for; `more` are overrides that come first."""
    arguments = [argument for argument in (args.recipe, *args.overrides) if argument is not None]
    recipes: list[str | Path] = []
    while arguments and "=" not in arguments[0]:
        recipes.append(arguments.pop(0))
    return load_config(recipes or default_recipe, [*more, *arguments])
