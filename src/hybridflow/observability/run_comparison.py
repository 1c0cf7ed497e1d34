"""What differs between two runs: configuration, versions, prompts and curves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.observability.metrics import is_reproducible
from hybridflow.observability.run_files import RunFiles

LAST = 10
"""Steps at the end of the common ones whose mean is compared."""

ENVIRONMENT = ("versions", "git", "hardware", "kind")
"""What a start records of its environment."""


@dataclass(frozen=True)
class CurveDifference:
    """A metric over the steps that both runs have: where it first differs, and the means over the last LAST of them.

    `largest`: the largest absolute difference, infinite if only one of the values is finite.
    """

    name: str
    first_step: int
    largest: float
    mean_a: float
    mean_b: float


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs.

    `config` and `environment`: the values of both by key, None where one lacks it. `steps`: the common ones.
    `first_other_prompts`: the first common step with other prompts; None if there is none; `has_prompts`: whether both
    runs say which prompts they used. `curves`: metrics that equal runs share; `num_equal` of them are equal. `times`:
    metrics that differ between any two runs. `only`: the metrics that one run lacks.
    """

    config: dict[str, tuple[Any, Any]]
    environment: dict[str, tuple[Any, Any]]
    steps: list[int]
    has_prompts: bool
    first_other_prompts: int | None
    curves: list[CurveDifference]
    num_equal: int
    times: list[CurveDifference]
    only: tuple[list[str], list[str]]


def compare_runs(a: RunFiles, b: RunFiles) -> Comparison:
    """Return what differs between two runs; raises DataError if a file of one is damaged."""
    rows_a, rows_b = ({row["step"]: row for row in run.metrics} for run in (a, b))
    steps = sorted(rows_a.keys() & rows_b.keys())
    names_a, names_b = ({name for row in rows.values() for name in row} - {"step"} for rows in (rows_a, rows_b))
    differences = {name: _difference(name, steps, rows_a, rows_b) for name in sorted(names_a & names_b)}
    stable = [name for name in differences if is_reproducible(name)]
    curves = [difference for name in stable if (difference := differences[name])]
    prompts_a, prompts_b = ({row["step"]: row.get("prompt_id") for row in run.rollouts} for run in (a, b))
    others = [step for step in sorted(prompts_a.keys() & prompts_b.keys()) if prompts_a[step] != prompts_b[step]]
    return Comparison(
        config=_differing(a.config, b.config),
        environment=_differing(_environment(a), _environment(b)),
        steps=steps,
        has_prompts=bool(prompts_a.keys() & prompts_b.keys()),
        first_other_prompts=others[0] if others else None,
        curves=sorted(curves, key=lambda difference: (difference.first_step, difference.name)),
        num_equal=len(stable) - len(curves),
        times=[each for name, each in differences.items() if each and not is_reproducible(name)],
        only=(sorted(names_a - names_b), sorted(names_b - names_a)),
    )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}


def _environment(run: RunFiles) -> dict[str, Any]:
    start, values = run.starts[-1], {}
    for name in ENVIRONMENT:
        value = start.get(name)
        if isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[name] = value
    return values


def _difference(
    name: str, steps: list[int], rows_a: Mapping[int, Mapping[str, Any]], rows_b: Mapping[int, Mapping[str, Any]]
) -> CurveDifference | None:
    """Return how a metric differs over steps; None if both runs have the same values."""
    pairs = [(step, rows_a[step].get(name), rows_b[step].get(name)) for step in steps]
    pairs = [(step, x, y) for step, x, y in pairs if x is not None or y is not None]
    others = [(step, x, y) for step, x, y in pairs if repr(x) != repr(y)]
    if not others:
        return None
    last = pairs[-LAST:]
    return CurveDifference(
        name,
        first_step=others[0][0],
        largest=max(_distance(x, y) for _, x, y in others),
        mean_a=_mean([x for _, x, _ in last]),
        mean_b=_mean([y for _, _, y in last]),
    )


def _distance(x: Any, y: Any) -> float:
    if not isinstance(x, int | float) or not isinstance(y, int | float):
        return math.inf
    distance = abs(x - y)
    return math.inf if math.isnan(distance) else distance


def _mean(values: list[Any]) -> float:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return math.fsum(numbers) / len(numbers) if numbers and all(map(math.isfinite, numbers)) else math.nan
