"""Make a recipe of a configuration of verl, and list what has no equal.

The file is YAML, or a shell script with the arguments (`key=value` words). Defaults of verl that differ from ours are
written too. docs/coming_from.md says what differs in meaning, and has the keys of TRL and OpenRLHF with ours.
"""

import argparse
from pathlib import Path

from hybridflow.cli.migration.convert import convert
from hybridflow.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the output."""
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML file, or shell script with the arguments")
    parser.add_argument("--output", type=Path, metavar="RECIPE", help="file to write (default: print)")


def run(args: argparse.Namespace) -> int:
    """Write the recipe, and print what was not carried over."""
    from hybridflow.cli.output import write_output
    from hybridflow.config import load_config
    from hybridflow.config.render import toml_value

    found = convert(args.file)
    text = found.recipe()
    if args.output is None:
        print(text, end="")
    else:
        write_output(args.output, text)
        left_out = len(found.left_out)
        print(f"wrote {args.output}: {len(found.values)} keys; {left_out} that were not carried over are listed in it")
    try:
        load_config(None, [f"{key}={toml_value(value)}" for key, value in found.values.items()])
    except ConfigError as error:
        raise ConfigError(f"the recipe needs changes before it runs: {error}") from error
    return 0
