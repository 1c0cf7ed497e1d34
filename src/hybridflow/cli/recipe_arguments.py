"""The arguments `RECIPE ... [section.key=value ...]` of every command that reads a recipe."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hybridflow.config import Config, load_config


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


def config_of(args: argparse.Namespace, *, default_recipe: Path | None = None, more: Sequence[str] = ()) -> Config:
    """Return the configuration of the arguments; `more` are overrides that apply before those of the arguments."""
    arguments = [argument for argument in (args.recipe, *args.overrides) if argument is not None]
    recipes: list[str | Path] = []
    while arguments and "=" not in arguments[0]:
        recipes.append(arguments.pop(0))
    return load_config(recipes or default_recipe, [*more, *arguments])
