"""Show the dataflow of a recipe: the columns that each method reads, and the method that made them.

One step runs on placeholders, which compute nothing, so no model, data or device is needed. A column that no method
makes is an error, as at the start of `hybridflow train`. "controller" is the driver process: columns that it makes are
sent to workers, columns that it reads are fetched from them.
"""

import argparse
from pathlib import Path

from hybridflow.cli.arguments import add_recipe_arguments, config_of
from hybridflow.cli.output import write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe with its overrides, the format and `--output`."""
    add_recipe_arguments(parser)
    parser.add_argument("--format", choices=("text", "mermaid", "svg"), default="text", help="format of the drawing")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the drawing to a file instead of printing it"
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the drawing."""
    config = config_of(args)
    from hybridflow.runtime.observe import dataflow_edges, draw_mermaid, draw_svg, draw_text
    from hybridflow.trainers import placement_notes, run_on_placeholders

    edges, notes = dataflow_edges(run_on_placeholders(config)), placement_notes(config)
    drawing = {"text": draw_text, "mermaid": draw_mermaid, "svg": draw_svg}[args.format](edges, notes)
    if args.output:
        write_output(args.output, drawing)
    else:
        print(drawing, end="")
    return 0
