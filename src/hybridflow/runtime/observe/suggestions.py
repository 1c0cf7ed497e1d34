"""The values that a finding suggests for a key: functions of its current value."""

from collections.abc import Callable, Mapping
from typing import Any

Suggest = Callable[[Any], tuple[Any, ...] | None]
"""Returns the values to try in place of the current one: () if a person has to decide, None if the key is right."""

Changes = Mapping[str, Suggest]
"""Keys to change, in the order in which they are named."""


def times(*factors: float) -> Suggest:
    """Return multiples of a number, with two digits unless it is an integer; 0 and texts such as "auto" are right."""

    def suggest(now: Any) -> tuple[Any, ...] | None:
        if isinstance(now, str) or not now:
            return None
        if isinstance(now, int):
            return tuple(round(now * factor) for factor in factors)
        return tuple(float(f"{now * factor:.2g}") for factor in factors)

    return suggest


def times_or(*values: float) -> Suggest:
    """Return 3 and 10 times a number, or `values` if it is 0."""
    return lambda now: times(3, 10)(now) if now else values


def instead(of: Any, *values: Any) -> Suggest:
    """Return `values` if the key has the value `of`; otherwise it is right."""
    return lambda now: values if now == of else None


def unless(value: Any) -> Suggest:
    """Return `value` if the key has another one."""
    return lambda now: None if now == value else (value,)


def above(least: float, value: Any) -> Suggest:
    """Return `value` if the key is larger than `least`."""
    return lambda now: (value,) if now > least else None


def decide(_now: Any) -> tuple[Any, ...]:
    """Return no values: a person has to look."""
    return ()


def hotter(now: float) -> tuple[float, ...] | None:
    """Return higher sampling temperatures, of at most 1.4."""
    return tuple(value for value in (1.0, 1.2, 1.4) if value > now)[:2] or None
