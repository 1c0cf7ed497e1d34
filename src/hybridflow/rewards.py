"""The public import path of rewards; the package itself is `hybridflow.environments.rewards`."""

from hybridflow.environments import rewards

__all__ = rewards.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
    return getattr(rewards, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
