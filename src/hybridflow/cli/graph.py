"""Show the dataflow of a recipe: which method reads which columns, and who made them.

One step is run against placeholders, which compute nothing, so no model, data or device is needed. A column that nobody
makes is an error, as it is at the start of `hybridflow train`. "controller" is the program itself: what it makes is
sent, and what it reads is all that it needs to see.
"""

import argparse
from pathlib import Path

from hybridflow.cli.recipe_arguments import add_recipe_arguments, config_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--format", choices=("text", "mermaid", "dot"), default="text", help="how to draw it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    from hybridflow.observability import dataflow_edges, draw_dot, draw_mermaid, draw_text
    from hybridflow.runtime import write_text_atomically
    from hybridflow.trainers import placement_notes, run_on_placeholders

    draw = {"text": draw_text, "mermaid": draw_mermaid, "dot": draw_dot}[args.format]
    drawing = draw(dataflow_edges(run_on_placeholders(config)), placement_notes(config))
    if args.output:
        write_text_atomically(args.output, drawing)
    else:
        print(drawing, end="")
    return 0
