"""What the values of environment.classes may be: a class or agent of the user, or an environment of another package."""

import ast
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

SCHEMES = {
    "command": ("hybridflow.environments.agents.command", ""),
    "gymnasium": ("hybridflow.environments.adapters.gymnasium", "gymnasium"),
    "harbor": ("hybridflow.environments.adapters.harbor", ""),
    "mcp": ("hybridflow.environments.adapters.mcp", "mcp"),
    "openenv": ("hybridflow.environments.adapters.openenv", "openenv-core"),
    "reasoning-gym": ("hybridflow.environments.adapters.reasoning_gym", "reasoning-gym"),
    "verifiers": ("hybridflow.environments.adapters.verifiers", "verifiers"),
}
"""The adapter and the package on the index ("": none is needed) of a source "SCHEME:REST"."""

AGENTS = ("command", "verifiers")
"""The schemes whose sources are agents."""

FORMS = f"'path.py:Class', 'module:Class' or 'SCHEME:NAME' with a scheme of {', '.join(SCHEMES)}"


def scheme_of(source: str) -> str:
    """Return the scheme of a source "SCHEME:REST"; empty for a class of the user."""
    scheme, colon, _ = source.partition(":")
    return scheme if colon and scheme in SCHEMES else ""


def is_source(source: str) -> bool:
    """Return whether a text has the form of a class, of an environment of another package, or of a closure."""
    if scheme_of(source) or source.startswith("closure:"):
        return bool(source.partition(":")[2].strip())
    place, _, name = source.rpartition(":")
    return name.isidentifier() and (place.endswith(".py") or all(part.isidentifier() for part in place.split(".")))


def names_agent(source: str) -> bool:
    """Return whether a source names an agent, as far as its file shows: an `async` function, or a class of `Agent`."""
    place, _, name = source.rpartition(":")
    if scheme := scheme_of(source):
        return scheme in AGENTS
    with suppress(OSError, ValueError, SyntaxError, ImportError):
        path = place if place.endswith(".py") else getattr(find_spec(place), "origin", None)
        for each in ast.parse(Path(path or "").expanduser().read_bytes()).body:
            if isinstance(each, ast.AsyncFunctionDef) and each.name == name:
                return True
            if isinstance(each, ast.ClassDef) and each.name == name:
                return any(ast.unparse(base).rpartition(".")[2] == "Agent" for base in each.bases)
    return False
