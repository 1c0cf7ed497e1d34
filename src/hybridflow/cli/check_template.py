"""Check on a CPU whether a model's chat template can serve episodes of several turns, with tools.

ok: the tokens that a model samples stay, and only new messages are added to them. rows: the template changes earlier
turns, so that an episode goes on in a new row, which costs the tokens of its history once more. limited: the template
takes no such turn. failed: episodes cannot be trained; the exit status is 1.
"""

import argparse
import re

from hybridflow.cli.output import aligned
from hybridflow.errors import EnvironmentConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the tools."""
    parser.add_argument("model", metavar="MODEL", help="a model directory, or OWNER/NAME on the Hugging Face hub")
    parser.add_argument(
        "--chat-template",
        metavar="NAME",
        default="",
        help="check this one in place of the tokenizer's: a value of model.chat_template",
    )
    parser.add_argument(
        "--tools",
        metavar="SOURCE",
        help="FILE.py:CLASS, whose public methods are the tools, or another value of environment.classes (default: one "
        "tool of the check)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each check; return 1 if one failed."""
    from hybridflow.data import load_tokenizer, stop_token_ids
    from hybridflow.environments import check_template, tools_of
    from hybridflow.environments.adapters import load
    from hybridflow.models.hub import local_model

    directory = local_model("MODEL", args.model)
    tokenizer = load_tokenizer(directory, chat_template=args.chat_template)
    tools = []
    if args.tools:
        found, _ = load(args.tools, "--tools")
        try:
            instance = found()
        except Exception as error:  # a class of the user
            raise EnvironmentConfigError(
                f"--tools '{args.tools}' cannot be made without arguments: {type(error).__name__}: {error}"
            ) from error
        tools = list(tools_of(instance).values())
        if not tools:
            raise EnvironmentConfigError(f"--tools '{args.tools}' has no public methods, which would be its tools.")
    findings = check_template(tokenizer, stop_token_ids(tokenizer, directory), tools)
    print(
        "\n".join(aligned([[f.check, f.state, re.sub(r"\s+", " ", f.detail)] for f in findings], ends_with_text=True))
    )
    return int(any(finding.state == "failed" for finding in findings))
