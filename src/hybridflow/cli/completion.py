"""Print the script with which a shell completes commands, options, keys of a recipe and directories of runs.

For bash, in ~/.bashrc:  eval "$(hybridflow completion bash)"
For zsh, in ~/.zshrc:  eval "$(hybridflow completion zsh)"
For fish:  hybridflow completion fish > ~/.config/fish/completions/hybridflow.fish
"""

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS), help="the shell")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["hybridflow"], shell=args.shell))
    return 0


def complete(commands: Mapping[str, Any], module_of: Callable[[str], Any]) -> None:
    """Answer a shell that asks for completions of the `Command`s by name, and end this process.

    The shell has set `_ARGCOMPLETE`.
    """
    import argcomplete

    typed = os.environ.get("COMP_LINE", "").split()[1:2]
    parser = argparse.ArgumentParser(prog="hybridflow", allow_abbrev=False)
    of_names = parser.add_subparsers()
    for name, command in commands.items():
        of_command = of_names.add_parser(name, help=command.help)
        if typed == [name]:
            module_of(name).add_arguments(of_command)
            for action in of_command._actions:
                _add_completer(action)
    argcomplete.autocomplete(parser, validator=lambda found, prefix: found.startswith(prefix))


def _add_completer(action: Any) -> None:
    if action.dest in ("recipe", "overrides"):
        action.completer = _recipes_and_keys
    elif action.metavar in ("RUN", "RUN_DIR_OR_CHECKPOINT", "RUN_OR_MODEL", "A", "B") or action.dest == "run":
        action.completer = _runs


def _recipes_and_keys(prefix: str, **_: Any) -> Iterable[str]:
    """Return recipes below the directory that is typed, and keys that begin with what is typed."""
    from hybridflow.config import leaf_keys

    keys = [f"{key}=" for key in leaf_keys() if key.startswith(prefix)] if "=" not in prefix else []
    return [*_paths(prefix, lambda path: path.suffix == ".toml"), *keys]


def _runs(prefix: str, **_: Any) -> Iterable[str]:
    """Return directories of runs, and those that lead to one."""
    return _paths(prefix, lambda path: False)


def _paths(prefix: str, is_wanted: Any) -> list[str]:
    """Return wanted files, and directories that are runs or have something in them, by the path that is typed."""
    head, _, name = prefix.rpartition("/")
    start = Path(head) if head else Path("/" if prefix.startswith("/") else ".")
    found = []
    try:
        for path in sorted(start.iterdir()):
            if not path.name.startswith(name) or path.name.startswith(".") > name.startswith("."):
                continue
            shown = f"{head}/{path.name}" if head or prefix.startswith("/") else path.name
            if path.is_dir():
                found.append(shown if (path / "run.json").is_file() else f"{shown}/")
            elif is_wanted(path):
                found.append(shown)
    except OSError:  # a directory that is missing or cannot be listed completes nothing
        return []
    return found
