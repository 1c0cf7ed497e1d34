"""The public import path of metrics and trackers; the package itself is `hybridflow.runtime.observe`."""

from hybridflow.runtime import observe

__all__ = observe.__all__  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute {name!r}")
    return getattr(observe, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
