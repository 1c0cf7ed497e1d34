"""Show the configuration that a run would have, after the recipe and the overrides, checked, as TOML.

With --reference: every key with its type, its default and its meaning.
"""

import argparse

from hybridflow.cli.recipe_arguments import add_recipe_arguments, config_of
from hybridflow.config import reference_markdown, reference_text, to_toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--reference", action="store_true", help="list every key instead")
    parser.add_argument("--markdown", action="store_true", help="with --reference: as Markdown tables")


def run(args: argparse.Namespace) -> int:
    if args.reference:
        print(reference_markdown() if args.markdown else reference_text(), end="")
        return 0
    print(to_toml(config_of(args)), end="")
    return 0
