"""What the values of environment.classes may be: a class or agent of the user, or an environment of another package."""

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

FORMS = f"'path.py:Class', 'path.py:function', 'module:Class' or 'SCHEME:NAME' with a scheme of {', '.join(SCHEMES)}"


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
