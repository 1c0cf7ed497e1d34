"""The evidence that findings look at: configuration, metrics and samples of a run. Knows no finding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from hybridflow.config import Config, leaf_keys
from hybridflow.errors import DataError
from hybridflow.observability.run_files import RunFiles

Row = Mapping[str, Any]

MAX_STEPS = 2**53
"""Integers above are not exact as floats."""


@dataclass(frozen=True)
class Evidence:
    """`config` by dotted key; rows of metrics.jsonl, samples.jsonl and rollouts.jsonl, each with its step.

    `rows` are training steps, oldest first; the means are those of the newest `advice.window` rows. `total_steps`: 0
    if unknown.
    """

    config: Mapping[str, Any]
    rows: Sequence[Row]
    samples: Sequence[Row] = ()
    rollouts: Sequence[Row] = ()
    total_steps: int = 0

    @cached_property
    def recent(self) -> Sequence[Row]:
        """The newest rows, as many as `advice.window` says."""
        return self.rows[-self.config["advice.window"] :]

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step of the recent rows; (0, 0) without rows."""
        return (self.recent[0]["step"], self.recent[-1]["step"]) if self.recent else (0, 0)

    def mean(self, name: str) -> float | None:
        """Return the mean of the finite values of a metric in the recent rows, None if they have none."""
        values = [value for row in self.recent if (value := row.get(name)) is not None and math.isfinite(value)]
        return math.fsum(value / len(values) for value in values) if values else None  # their sum may overflow

    def names(self, pattern: str) -> list[str]:
        """Return the metrics of the recent rows that match a pattern such as "perf/*_idle_share", sorted."""
        return sorted({name for row in self.recent for name in row if fnmatchcase(name, pattern)})

    def until(self, place: int, num_rows: int) -> "Evidence":
        """Return the evidence of the metrics as it was after so many rows, the last `num_rows` of which are recent."""
        return Evidence({**self.config, "advice.window": num_rows}, self.rows[:place], total_steps=self.total_steps)

    def of_steps(self, steps: range) -> "Evidence":
        """Return the evidence as it was after some steps, all of which are recent."""
        num_rows, place = (
            sum(row["step"] in steps for row in self.rows),
            sum(row["step"] < steps.stop for row in self.rows),
        )
        of_metrics = self.until(place, max(1, num_rows))
        rows = ([row for row in rows if row["step"] in steps] for rows in (self.samples, self.rollouts))
        return replace(of_metrics, samples=next(rows), rollouts=next(rows))


def evidence_of(run: RunFiles) -> Evidence:
    """Return the evidence of a run directory. Keys that an older run lacks have their default.

    Raises DataError if a recorded value of the configuration is invalid.
    """
    config = _recorded_config(run)
    total_steps = run.starts[-1].get("total_steps") or config["trainer.total_steps"]
    if not isinstance(total_steps, int) or not 0 <= total_steps <= MAX_STEPS:
        raise DataError(f"'{run.path / 'run.json'}': total_steps={total_steps!r:.100} is invalid; restore the file.")
    rows = [_without_unknown(row) for row in run.metrics if row["step"] > 0]
    return Evidence(config, rows, run.samples, run.rollouts, total_steps)


def _recorded_config(run: RunFiles) -> dict[str, Any]:
    known = {name: value for name, value in run.config.items() if name in leaf_keys()}
    values: dict[str, Any] = Config().model_dump()
    for name, value in known.items():
        *sections, key = name.split(".")
        section = values
        for each in sections:
            section = section[each]
        section[key] = value
    try:
        return {**run.config, **leaf_keys(Config.model_validate(values))}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"'{run.path / 'run.json'}': {key}={first['input']!r:.100} is invalid: {first['msg']}; restore the file."
        ) from error


def _without_unknown(row: Row) -> Row:
    """Return a row without the metrics that are missing (None), or too large for a float."""
    unknown = {
        name for name, value in row.items() if value is None or (isinstance(value, int) and abs(value) > MAX_STEPS)
    }
    return {name: value for name, value in row.items() if name not in unknown} if unknown else row
