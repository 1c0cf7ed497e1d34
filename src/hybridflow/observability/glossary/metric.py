"""What the glossary says of a metric: unit, meaning, when to worry, and the reduction over ranks."""

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.sections.advice import AdviceConfig

Reduction = Literal["sum", "mean", "max", "min", "last"]

Unit = Literal["1", "count", "score", "score^2", "nats", "tokens", "tokens/s", "s", "ms/token", "bytes", "steps"]
"""Unit of a metric. "1": shares, ratios, and numbers without a unit; "score": that of the reward function's numbers."""

LIMITS = AdviceConfig()
"""The thresholds of the advice, which `worry` repeats: the defaults of the section `advice`."""
MUCH_PADDING = 0.5
"""Share of the tokens of an update that are padding, above which it is much."""
MANY_MICRO_BATCHES = 64
"""Micro-batches of an optimizer step on a rank above which the token budget is small."""


@dataclass(frozen=True)
class Metric:
    """A metric. `reduction` joins the values of the ranks; ranks report their part of a global mean, so it is a sum.

    `worry`: the values that point to a fault, and what it may be; empty if a value alone says nothing.
    """

    description: str
    unit: Unit
    reduction: Reduction = "mean"
    worry: str = ""


def spread_of(name: str, what: str, unit: Unit, *, mean: str = "", largest: str = "") -> dict[str, Metric]:
    """Return the metrics of `spread(name, ...)`; `mean` and `largest` say when to worry about these two."""
    return {
        f"{name}/mean": Metric(f"{what}: mean.", unit, worry=mean),
        f"{name}/max": Metric(f"{what}: largest.", unit, "max", largest),
        f"{name}/min": Metric(f"{what}: smallest.", unit, "min"),
    }
