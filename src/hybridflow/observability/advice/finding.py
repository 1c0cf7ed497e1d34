"""A finding: what it looks for, why it matters, and the keys to change; and the looks that several findings share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridflow.observability.advice.evidence import Evidence

Suggest = Callable[[Any], tuple[Any, ...] | None]
"""Returns the values to try in place of the current one: () if a person has to decide, None if the key is right."""


class Change(NamedTuple):
    """A key, and the values to try in place of its current one."""

    key: str
    suggest: Suggest


class Seen(NamedTuple):
    """What was seen, with numbers, and further keys that only apply to it."""

    text: str
    changes: tuple[Change, ...] = ()


Look = Callable[[Evidence, float], Seen | None]
"""Returns what was seen if the evidence is beyond the threshold."""


@dataclass(frozen=True)
class Finding:
    """A finding. `found_if` describes the condition, in which the threshold is `advice.<threshold>`, or a fixed number.

    `hides`: names of findings that say less if this one is found. `at_first_step`: the least threshold of a look at
    the first step alone; None: one step proves nothing.
    """

    name: str
    threshold: str | float
    found_if: str
    look: Look
    why: str
    changes: tuple[Change, ...]
    hides: tuple[str, ...] = ()
    at_first_step: float | None = None


def mean_above(text: str, *patterns: str) -> Look:
    """Return a look for a metric whose mean is above the threshold; of several the largest counts.

    `text` may have `{mean}` and `{name}`.
    """

    def look(evidence: Evidence, threshold: float) -> Seen | None:
        names = [name for pattern in patterns for name in evidence.names(pattern)]
        means = {name: mean for name in names if (mean := evidence.mean(name)) is not None}
        worst = max(means, key=means.__getitem__, default=None)
        if worst is None or not means[worst] > threshold:
            return None
        return Seen(text.format(mean=means[worst], name=worst))

    return look


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


SMALLER_LR = times(1 / 3, 1 / 10)


def hotter(now: float) -> tuple[float, ...] | None:
    """Return higher sampling temperatures, of at most 1.4."""
    return tuple(value for value in (1.0, 1.2, 1.4) if value > now)[:2] or None


def config_of(evidence: Evidence, prefix: str) -> Mapping[str, Any]:
    """Return the values of a section by key, such as those of "actor.optimizer"."""
    start = f"{prefix}."
    return {key.removeprefix(start): value for key, value in evidence.config.items() if key.startswith(start)}
