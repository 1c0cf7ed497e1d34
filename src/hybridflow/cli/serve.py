"""Serve a model at a base URL, for agents that speak the protocols of OpenAI or Anthropic, until Ctrl-C.

RUN_OR_MODEL is the directory of a run, whose newest checkpoint is served, or of a model. What a request leaves out is
as the run samples: rollout.temperature, rollout.top_p, rollout.top_k and data.max_response_length. The prompt and the
answer may have as many tokens as the model has positions. One process of this machine generates, whatever the run had.
"""

import argparse
import ipaddress
import os
import secrets
import shlex
from contextlib import suppress
from pathlib import Path

from hybridflow.cli.arguments import add_recipe_arguments, port_number
from hybridflow.cli.checkpoint_arguments import config_and_checkpoint
from hybridflow.config.render import toml_value
from hybridflow.errors import ConfigError

KEYS = (
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "data.max_response_length", "model.chat_template"),
    *("rollout.backend", "rollout.max_model_len", "rollout.max_running_sequences", "trainer.seed"),
)

KEY_VARIABLE = "HYBRIDFLOW_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is served, a recipe with its overrides, the address, the key and the record."""
    parser.add_argument("source", type=Path, metavar="RUN_OR_MODEL", help="directory of a run, or of a model")
    add_recipe_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: only this machine)")
    parser.add_argument("--port", type=port_number, default=8000, help="port (default: 8000; 0: a free one)")
    parser.add_argument("--key", help=f"key that clients must send (default: {KEY_VARIABLE}, or a random one)")
    parser.add_argument(
        "--record", metavar="DIR", default="", help="append each turn with its tokens to turns.jsonl in this directory"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    key, source = _key(args.key), args.source
    is_run = (source / "config.toml").is_file()
    if source.is_dir() and not is_run and not (source / "config.json").is_file():
        raise ConfigError(
            f"'{source}' is neither a run, which has a config.toml, nor a model, which has a config.json; name the "
            "directory of one of them."
        )
    args.run, args.checkpoint, args.step = source if is_run else None, None, None
    config, checkpoint = config_and_checkpoint(args, [] if is_run else [f"model.path={toml_value(str(source))}"])
    from hybridflow.runtime.observe import get_logger
    from hybridflow.trainers.build.build_generation import built_server

    if not _is_loopback(args.host):
        get_logger(__name__).warning(
            "--host %s is reached by other machines too: a client that has the key can use the model, and what is sent "
            "is not encrypted",
            args.host,
        )
    with (
        built_server(config, checkpoint, host=args.host, port=args.port, key=key, record=args.record) as server,
        suppress(KeyboardInterrupt),
    ):
        url, shown = server.base_url(), shlex.quote(key)
        print(f"serving {checkpoint.directory if checkpoint else source} until Ctrl-C")
        print(f"base URL: {url}/v1\nkey: {key}\n")
        print(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}")
        print(f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={shown}", flush=True)
        server.serve()
    print("ended")
    return 0


def _key(given: str | None) -> str:
    """Return the key of the command line, of the environment, or a random one."""
    name, key = ("--key", given) if given is not None else (KEY_VARIABLE, os.environ.get(KEY_VARIABLE))
    if key is None:
        return secrets.token_urlsafe(24)
    if not key or not all("!" <= character <= "~" for character in key):
        raise ConfigError(f"{name} is invalid: a key has one or more ASCII characters without spaces; choose another.")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
