"""Print the configuration of a run as TOML, after the recipe, the overrides and the checks.

With --reference: print all keys with type, default and description.
"""

import argparse

from hybridflow.cli.arguments import add_recipe_arguments, config_of
from hybridflow.config import reference_markdown, reference_text, to_toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe with its overrides, and `--reference`."""
    add_recipe_arguments(parser)
    parser.add_argument("--reference", action="store_true", help="print all keys instead")
    parser.add_argument("--markdown", action="store_true", help="with --reference: as Markdown tables")


def run(args: argparse.Namespace) -> int:
    """Print the configuration or the reference."""
    if args.reference:
        print(reference_markdown() if args.markdown else reference_text(), end="")
        return 0
    print(to_toml(config_of(args)), end="")
    return 0
