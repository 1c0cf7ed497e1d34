"""What becomes of a key of another framework: our keys, and how its value changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class NoEqualError(ValueError):
    """A value that has no equal here; its text says what to do instead."""


@dataclass(frozen=True)
class Move:
    """A key moves to `keys`; `value` changes its value, and raises NoEqualError if there is no equal."""

    keys: tuple[str, ...]
    value: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Framework:
    """The keys of a framework, its defaults where they differ from ours, and keys that need no equal.

    `marks`: keys by which a file is recognized. `finish(values, theirs)` settles what depends on several keys; it
    returns notes. `names`: keys of other versions, each with the one that `moves` has.
    `needs`: keys of which a file has one, unless it belongs to another kind of training.
    """

    name: str
    marks: tuple[str, ...]
    moves: Mapping[str, Move]
    defaults: Mapping[str, Any]
    ignored: tuple[str, ...]
    finish: Callable[[dict[str, Any], Mapping[str, Any]], list[str]]
    names: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


TRACKERS = ("wandb", "mlflow", "tensorboard")


def trackers_of(value: Any) -> list[str]:
    """Return those of the named trackers that exist here; the console is always there."""
    return [name for name in (value if isinstance(value, list) else [value]) if name in TRACKERS]


def to(*keys: str) -> Move:
    """Return the move of a value as it is."""
    return Move(keys)


def renamed(key: str, names: Mapping[Any, Any]) -> Move:
    """Return the move of one of some names, each with another name here."""

    def value(theirs: Any) -> Any:
        if theirs not in names:
            raise NoEqualError(f"expected one of {', '.join(map(str, names))}")
        return names[theirs]

    return Move((key,), value)


def without(key: str, *, where: tuple[Any, ...], instead: Any) -> Move:
    """Return the move of a value, of which some (such as -1 for "never") are written in another way here."""
    return Move((key,), lambda value: instead if value in where else value)


def files(key: str) -> Move:
    """Return the move of one file, or of a list of them."""
    return Move((key,), lambda value: list(value) if isinstance(value, list | tuple) else [value])


def switch(key: str, when: Any) -> Move:
    """Return the move of a boolean: true sets the key to `when`."""

    def value(theirs: Any) -> Any:
        if not theirs:
            raise NoEqualError("")  # false is the default, which needs no key
        return when

    return Move((key,), value)
