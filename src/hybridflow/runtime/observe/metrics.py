"""The table of metrics, and pure functions on dictionaries of them: prefixes, spreads, reduction over ranks.

`metric_table.md` is the table: name, unit, meaning, when to worry, and how values of several ranks become one.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

from hybridflow.errors import FieldError

Reduction = Literal["sum", "mean", "max", "min", "last"]

Unit = Literal["1", "count", "score", "score^2", "nats", "tokens", "tokens/s", "s", "ms/token", "bytes", "steps"]
"""Unit of a metric. "1": shares, ratios, and numbers without a unit; "score": that of the reward function's numbers."""


@dataclass(frozen=True)
class Metric:
    """A metric. `reduction` joins the values of the ranks; ranks report their part of a global mean, so it is a sum.

    `worry`: the values that point to a fault, and what it may be; empty if a value alone says nothing.
    """

    description: str
    unit: Unit
    reduction: Reduction = "mean"
    worry: str = ""


def metrics_markdown() -> str:
    """Return the table of metrics, in Markdown."""
    return Path(__file__).with_name("metric_table.md").read_text(encoding="utf-8")


def _read_table() -> dict[str, Metric]:
    metrics = {}
    for line in metrics_markdown().splitlines()[2:]:
        name, unit, description, worry, reduction = (cell.strip() for cell in line.strip("|").split(" | "))
        metrics[name.strip("`")] = Metric(description, cast(Unit, unit), cast(Reduction, reduction), worry)
    return metrics


METRICS = _read_table()
"""Metrics by name; in a name, `<...>` stands for any text."""


def find_metric(name: str) -> Metric | None:
    """Return the entry of `name`, or the first with matching placeholders (`timing_s/<stage>`), or None."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for pattern, metric in METRICS.items() if _matches(name, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    return "<" in pattern and fnmatchcase(name, re.sub("<[^>]+>", "*", pattern))


VARYING = ("timing_s/", "timing_per_token_ms/", "perf/", "mfu/", "memory_bytes/", "transfer/", "recovery/")
"""Prefixes of metrics that differ between equal runs: times, memory, and how values have travelled."""


def is_reproducible(name: str) -> bool:
    """Return whether equal runs have equal values of a metric."""
    return not name.startswith(VARYING) or name == "perf/num_tokens"


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries, names joined by `/`: `flatten({"actor": {"lr": 1}})` is `{"actor/lr": 1}`."""
    flat = {}
    for key, value in metrics.items():
        name = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            flat.update(flatten(value, name))
        else:
            flat[name] = value
    return flat


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return `name/mean`, `name/max` and `name/min` of the values; an empty dictionary without values."""
    numbers = [float(value) for value in values]
    if not numbers:
        return {}
    return {
        f"{name}/mean": math.fsum(numbers) / len(numbers),
        f"{name}/max": max(numbers),
        f"{name}/min": min(numbers),
    }


def reduce_lists(lists: Mapping[str, float | Sequence[float]]) -> dict[str, float]:
    """Reduce each list of values of the ranks, as gathered by `DataProto.concat`; single numbers are kept.

    The reduction of a name is that in the table `METRICS`. Raises FieldError if ranks differ in a name without one.
    """
    return {
        name: _reduce(name, list(values)) if isinstance(values, Sequence) else values
        for name, values in lists.items()
        if not isinstance(values, Sequence) or len(values)
    }


def _reduce(name: str, values: list[float]) -> float:
    metric = find_metric(name)
    match metric.reduction if metric else None:
        case "sum":
            return math.fsum(values)
        case "mean":
            return math.fsum(values) / len(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "last":
            return values[-1]
    if any(value != values[0] for value in values):
        raise FieldError(
            f"the ranks report different values of '{name}' ({', '.join(map(str, values))}) and it has no reduction; "
            "add it to runtime/observe/metric_table.md."
        )
    return values[0]


def mean_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over optimizer steps; the last value of `/lr`, the largest of `_max`."""

    def combine(name: str) -> float:
        values = [step[name] for step in steps]
        if name.endswith("/lr"):
            return values[-1]
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    return {name: combine(name) for name in steps[-1]}
