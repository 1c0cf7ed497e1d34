"""The evidence that findings look at: configuration, metrics and samples of a run. Knows no finding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from hybridflow.config import Config, leaf_keys
from hybridflow.errors import DataError
from hybridflow.runtime.observe.run_files import RunFiles

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Evidence:
    """`config` by dotted key; rows of metrics.jsonl and samples.jsonl, each with its step.

    `rows` are training steps, oldest first; the means are those of the newest `advice.window` rows.
    """

    config: Mapping[str, Any]
    rows: Sequence[Row]
    samples: Sequence[Row] = ()

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
        return Evidence({**self.config, "advice.window": num_rows}, self.rows[:place])

    def of_steps(self, steps: range) -> "Evidence":
        """Return the evidence as it was after some steps, all of which are recent."""
        rows = [row for row in self.rows if row["step"] < steps.stop]
        num_rows = max(1, sum(row["step"] in steps for row in rows))
        samples = [row for row in self.samples if row["step"] in steps]
        return Evidence({**self.config, "advice.window": num_rows}, rows, samples)


def evidence_of(run: RunFiles) -> Evidence:
    """Return the evidence of a run directory. Keys that an older run lacks have their default.

    Raises DataError if a recorded value of the configuration is invalid.
    """
    rows = [{name: value for name, value in row.items() if value is not None} for row in run.metrics if row["step"] > 0]
    return Evidence(_recorded_config(run), rows, run.samples)


def _recorded_config(run: RunFiles) -> dict[str, Any]:
    values: dict[str, Any] = Config().model_dump()
    for name in run.config.keys() & leaf_keys().keys():
        *sections, key = name.split(".")
        section = values
        for each in sections:
            section = section[each]
        section[key] = run.config[name]
    try:
        return {**run.config, **leaf_keys(Config.model_validate(values))}
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"'{run.path / 'run.json'}': {key}={first['input']!r:.100} is invalid: {first['msg']}; restore the file."
        ) from error
