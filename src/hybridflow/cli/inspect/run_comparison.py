"""What differs between two runs: configuration, versions, data and curves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hybridflow.runtime.observe.metrics import is_reproducible
from hybridflow.runtime.observe.run_files import RunFiles

LAST = 10
"""Steps at the end whose mean is compared."""

ENVIRONMENT = ("kind", "versions", "git", "hardware")
"""Keys of a start's record that describe its environment."""

DATA = ("data", "models")
"""Keys of a start's record that describe its data files and initial models: numbers of rows, fingerprints."""


@dataclass(frozen=True)
class CurveDifference:
    """A metric over the steps at which both runs have it: where it first differs, by how much, and where it ends.

    `largest`: the largest absolute difference, infinite if only one of the values is a finite number. `mean_a` and
    `mean_b`: over the last LAST of these steps; NaN if one of the values is not a finite number.
    """

    name: str
    first_step: int
    largest: float
    last_a: Any
    last_b: Any
    mean_a: float
    mean_b: float


@dataclass(frozen=True)
class Comparison:
    """The differences between two runs, by their newest starts.

    A metric is not compared if the runs never have it at the same step.
    """

    config: dict[str, tuple[Any, Any]]
    environment: dict[str, tuple[Any, Any]]
    data: dict[str, tuple[Any, Any]]
    """Like `config` and `environment`: both runs' values by key, None where a run lacks the key."""
    has_data: bool
    """Whether both recorded their data."""
    steps: list[int]
    """Steps that both runs have."""
    last_steps: tuple[int, int]
    """The last step of each run."""
    has_prompts: bool
    """Whether both runs say which prompts they used."""
    first_other_prompts: int | None
    """The first common step with other prompts; None if there is none."""
    curves: list[CurveDifference]
    """Metrics that would be equal in equal runs but differ here, by the first step."""
    num_equal: int
    """Number of metrics that would be equal in equal runs and are equal here."""
    times: list[CurveDifference]
    """Metrics that differ between any two runs."""
    only: tuple[list[str], list[str]]
    """The metrics that the other run lacks."""


def compare_runs(a: RunFiles, b: RunFiles, pattern: str = "*") -> Comparison:
    """Return what differs between two runs, of the metrics whose name matches a pattern such as `*kl*`.

    Raises DataError or CheckpointError if a file of one is damaged.
    """
    rows_a, rows_b = ({row["step"]: row for row in run.metrics} for run in (a, b))
    steps = sorted(rows_a.keys() & rows_b.keys())
    names_a, names_b = (
        {name for row in rows.values() for name in row if name != "step" and fnmatchcase(name, pattern)}
        for rows in (rows_a, rows_b)
    )
    common = {name for step in steps for name in rows_a[step].keys() & rows_b[step].keys()}
    differences = {name: _difference(name, steps, rows_a, rows_b) for name in sorted(common & names_a)}
    stable = [name for name in differences if is_reproducible(name)]
    curves = [difference for name in stable if (difference := differences[name])]
    prompts_a, prompts_b = ({row["step"]: row.get("prompt_id") for row in run.rollouts} for run in (a, b))
    others = [step for step in sorted(prompts_a.keys() & prompts_b.keys()) if prompts_a[step] != prompts_b[step]]
    return Comparison(
        config=_differing(a.shown_config, b.shown_config),
        environment=_differing(*(_recorded(run, ENVIRONMENT) for run in (a, b))),
        data={  # a model of a role that only one run has does not count
            key: pair
            for key, pair in _differing(*(_recorded(run, DATA) for run in (a, b))).items()
            if not (key.startswith("models.") and None in pair)
        },
        has_data=all("data" in run.starts[-1] for run in (a, b)),
        steps=steps,
        last_steps=(max(rows_a, default=0), max(rows_b, default=0)),
        has_prompts=bool(prompts_a.keys() & prompts_b.keys()),
        first_other_prompts=others[0] if others else None,
        curves=sorted(curves, key=lambda difference: (difference.first_step, difference.name)),
        num_equal=len(stable) - len(curves),
        times=[each for name, each in differences.items() if each and not is_reproducible(name)],
        only=(sorted(names_a - names_b), sorted(names_b - names_a)),
    )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)}


def _recorded(run: RunFiles, names: tuple[str, ...]) -> dict[str, Any]:
    start, values = run.starts[-1], {}
    for name in names:
        value = start.get(name)
        if isinstance(value, dict):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[name] = value
    return values


def _difference(
    name: str, steps: list[int], rows_a: Mapping[int, Mapping[str, Any]], rows_b: Mapping[int, Mapping[str, Any]]
) -> CurveDifference | None:
    """Return how a metric differs over steps at which both rows have it; None if both runs have the same values."""
    pairs = [
        (step, rows_a[step][name], rows_b[step][name])
        for step in steps
        if name in rows_a[step] and name in rows_b[step]
    ]
    others = [(step, x, y) for step, x, y in pairs if x != y and (x == x or y == y)]  # NaN is the same as NaN
    if not others:
        return None
    _, last_a, last_b = pairs[-1]
    return CurveDifference(
        name,
        first_step=others[0][0],
        largest=max(_distance(x, y) for _, x, y in others),
        last_a=last_a,
        last_b=last_b,
        mean_a=_mean([x for _, x, _ in pairs[-LAST:]]),
        mean_b=_mean([y for _, _, y in pairs[-LAST:]]),
    )


def _distance(x: Any, y: Any) -> float:
    if not isinstance(x, int | float) or not isinstance(y, int | float):
        return math.inf
    distance = float(abs(x - y))
    return math.inf if math.isnan(distance) else distance


def _mean(values: list[Any]) -> float:
    """Return the mean of the numbers; NaN without one, and if one is not finite."""
    try:
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        return math.fsum(numbers) / len(numbers) if numbers and all(map(math.isfinite, numbers)) else math.nan
    except OverflowError:
        return math.nan
