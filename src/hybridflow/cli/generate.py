"""Write responses to prompts, with the model of a recipe, of a directory or of a checkpoint.

The keys `validation.*` set the sampling: by default one greedy response of at most data.max_response_length tokens for
each prompt; validation.group_size=4 validation.temperature=1 gives several.
"""

import argparse
from pathlib import Path
from typing import Any

from hybridflow.cli.checkpoint_arguments import add_checkpoint_arguments, chosen_checkpoint, recipe_of_run
from hybridflow.cli.output_file import add_output, write_rows
from hybridflow.cli.recipe_arguments import add_recipe_arguments, config_of
from hybridflow.config.render import toml_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe with its overrides, the prompts, the model and `--output`."""
    add_recipe_arguments(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="user message; repeat the option for several prompts"
    )
    prompts.add_argument(
        "--prompts-file", metavar="FILE", help="parquet file with chat messages in the column `prompt`"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="model directory; replaces model.path of the recipe")
    add_checkpoint_arguments(parser)
    add_output(parser, "prompts and responses")


def run(args: argparse.Namespace) -> int:
    """Print the responses."""
    more = [f"model.path={toml_value(str(args.model))}"] if args.model else []
    config = config_of(args, default_recipe=recipe_of_run(args), more=more)
    checkpoint = chosen_checkpoint(args)
    from hybridflow.trainers import build_generator
    from hybridflow.trainers.generation import prompts_of_files, typed_prompts

    prompts = typed_prompts(args.prompt) if args.prompt else prompts_of_files(args.prompts_file)
    with build_generator(config, checkpoint) as generator:
        rows = generator.run(prompts)
    for row in rows:
        _show(row)
    if args.output:
        write_rows(args.output, rows)
    return 0


def _show(row: dict[str, Any]) -> None:
    print(f"prompt: {row['prompt']}")
    for response, reason in zip(row["responses"], row["finish_reasons"], strict=True):
        print(f"response{' (cut)' if reason == 'length' else ''}: {response}")
    print()
