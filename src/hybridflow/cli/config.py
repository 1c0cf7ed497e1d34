"""Show the configuration that a run would have, after the recipe and the overrides, checked, as TOML.

With --reference: every key with its type, its default and its meaning.
"""

import argparse

from hybridflow.config import load_config, reference_markdown, reference_text, to_toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", nargs="?", help="a TOML file; without one the defaults (a first argument with = is an override)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the recipe")
    parser.add_argument("--reference", action="store_true", help="list every key instead")
    parser.add_argument("--markdown", action="store_true", help="with --reference: as Markdown tables")


def run(args: argparse.Namespace) -> int:
    if args.reference:
        print(reference_markdown() if args.markdown else reference_text(), end="")
        return 0
    arguments = [argument for argument in (args.recipe, *args.overrides) if argument is not None]
    recipe = arguments.pop(0) if arguments and "=" not in arguments[0] else None
    print(to_toml(load_config(recipe, arguments)), end="")
    return 0
