"""Write responses to prompts, with the model of a recipe, of a directory or of a checkpoint.

The keys `validation.*` set the sampling: by default one greedy response of at most data.max_response_length tokens for
each prompt; validation.group_size=4 validation.temperature=1 gives several. If the model has too few positions for that
length, it is capped, unless data.max_response_length=N is given on the command line.
"""

import argparse
from pathlib import Path

from hybridflow.cli.arguments import add_recipe_arguments
from hybridflow.cli.checkpoint_arguments import add_checkpoint_arguments, config_and_checkpoint
from hybridflow.cli.output import add_output, write_rows
from hybridflow.config.render import toml_value
from hybridflow.errors import ConfigError

KEYS = (
    *("model.path", "data.max_response_length", "validation.group_size", "validation.temperature"),
    *("data.chat_template", "rollout.backend"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe with its overrides, the prompts, the model and `--output`."""
    add_recipe_arguments(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="user message; repeat the option for several prompts"
    )
    prompts.add_argument(
        "--prompts-file", metavar="FILE", help="file of prompts, texts or chat messages in the column `prompt`"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt (needs a chat template)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="model directory; replaces model.path of the recipe")
    add_checkpoint_arguments(parser)
    add_output(parser, "prompts and responses")


def run(args: argparse.Namespace) -> int:
    """Print the responses."""
    more = [f"model.path={toml_value(str(args.model))}"] if args.model else []
    config, checkpoint = config_and_checkpoint(args, more)
    from hybridflow.data.data_rows import read_data_rows
    from hybridflow.trainers import build_generator
    from hybridflow.trainers.build.preconditions import with_required_files
    from hybridflow.trainers.run.text_generation import typed_prompts, with_system

    if not config.model.path:
        raise ConfigError("no model is named; give --run DIR, --model DIR, a RECIPE or model.path=DIR.")
    config = with_required_files(config)
    prompts = typed_prompts(args.prompt) if args.prompt else read_data_rows(args.prompts_file, "prompts")
    if args.system is not None:
        prompts = with_system(config, prompts, args.system)
    typed_keys = {change.partition("=")[0].strip() for change in (args.recipe or "", *args.overrides)}
    cap = "data.max_response_length" not in typed_keys
    with build_generator(config, checkpoint, prompts, cap_response_length=cap) as generator:
        rows = generator.run(prompts)
    for row in rows:
        print(f"prompt: {row['prompt']}")
        for response, reason in zip(row["responses"], row["finish_reasons"], strict=True):
            print(f"response{' (cut)' if reason == 'length' else ''}: {response}")
        print()
    if args.output:
        write_rows(args.output, rows)
    return 0
