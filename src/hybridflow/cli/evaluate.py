"""Score a model on the validation data (data.val_files) and print its metrics.

The model is that of --checkpoint or --run, otherwise model.path. The keys `validation.*` set the sampling: by default
one greedy response for each prompt; validation.group_size=8 validation.temperature=1 also reports pass@1 to pass@8.

With --agent an agent plays an episode for each prompt, in place of the environments of the recipe: a command, or a
function or class as in environment.classes. Episodes for which it gives no reward are scored by reward.function.
"""

import argparse

from hybridflow.cli.arguments import add_recipe_arguments
from hybridflow.cli.checkpoint_arguments import add_checkpoint_arguments, config_and_checkpoint
from hybridflow.cli.output import add_output, write_rows
from hybridflow.config.environment_sources import is_source, scheme_of
from hybridflow.config.render import toml_value
from hybridflow.errors import ConfigError

KEYS = (
    *("model.path", "data.val_files", "data.max_response_length", "reward.function", "validation.group_size"),
    *("validation.temperature", "validation.max_samples", "rollout.backend", "controller.num_workers"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe with its overrides, the checkpoint and `--output`."""
    add_recipe_arguments(parser)
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--agent",
        metavar="CMD",
        help="evaluate this agent: a command, 'path.py:function' or another source of environment.classes",
    )
    add_output(parser, "every sample with its score")


def run(args: argparse.Namespace) -> int:
    """Print the validation metrics."""
    args.overrides += [] if args.agent is None else _classes(args.agent)
    config, checkpoint = config_and_checkpoint(args)
    if not config.model.path:
        raise ConfigError("no model is named; give --run DIR, a RECIPE or model.path=DIR.")
    from hybridflow.trainers import build_validator

    with build_validator(config, checkpoint) as validator:
        metrics, samples = validator.run()
    width = max(map(len, metrics))
    for name, value in sorted(metrics.items()):
        print(f"{name:<{width}}  {value:.4f}")
    if args.output:
        write_rows(args.output, samples)
    return 0


def _classes(agent: str) -> list[str]:
    """Return the overrides that let an agent play all episodes; what is not a source is a command."""
    is_named = is_source(agent) and (scheme_of(agent) or len(agent.split()) == 1)
    source = agent if is_named else f"command:{agent}"
    return [f"environment.classes={{agent = {toml_value(source)}}}", "environment.weights={}"]
