"""The files of a run, read for people: pages, tables and advice. Nothing is written, and a running run may go on."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError, DataConfigError, DataError
from hybridflow.observability.jsonl import read_jsonl
from hybridflow.observability.trace import TRACE_FILE, TraceEvent, trace_event
from hybridflow.runtime import require_plain_file

METRICS, SAMPLES, ROLLOUTS = "metrics.jsonl", "samples.jsonl", "rollouts.jsonl"
RECOVERIES = "recoveries.jsonl"


def read_starts(directory: Path) -> list[dict[str, Any]]:
    """Return the starts in `run.json` of a run directory, oldest first; raises CheckpointError if it is damaged."""
    file = directory / "run.json"
    try:
        require_plain_file(file)
        starts = json.loads(file.read_text(encoding="utf-8"))["starts"] if file.exists() else []
        if not isinstance(starts, list):
            raise TypeError(f"starts is a {type(starts).__name__}, not a list")
        return starts
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"'{file}' is damaged ({error}); move it out of the directory to continue.") from error


class RunFiles:
    """The files of the run in a directory, each read when it is first asked for.

    Raises DataConfigError if the directory is not that of a run; reading raises DataError or CheckpointError, with the
    file and the line, if a file is damaged. A file that this run has not written is empty.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "run.json").is_file():
            raise DataConfigError(f"'{self.path}' is not the directory of a run: it has no run.json.")

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.resolve().name

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The starts of the run: time, step, configuration, versions and hardware of each."""
        starts = read_starts(self.path)
        if not starts or not all(isinstance(start, dict) for start in starts):
            raise DataError(f"'{self.path / 'run.json'}' has no start of a run; restore the file.")
        return starts

    @cached_property
    def config(self) -> dict[str, Any]:
        """The values of the newest start's configuration by key, such as "rollout.group_size"."""
        config = self.starts[-1].get("config")
        if not isinstance(config, dict):
            raise DataError(f"'{self.path / 'run.json'}' has no configuration; restore the file.")
        return config

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return self._rows(METRICS)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl: the responses that were kept, with their tokens."""
        return self._rows(SAMPLES)

    @cached_property
    def rollouts(self) -> list[dict[str, Any]]:
        """The rows of rollouts.jsonl: for each step, a list for each number of all its responses."""
        return self._rows(ROLLOUTS)

    @cached_property
    def recoveries(self) -> list[dict[str, Any]]:
        """The rows of recoveries.jsonl."""
        return self._rows(RECOVERIES)

    @cached_property
    def events(self) -> dict[int, list[TraceEvent]]:
        """The events of the trace by step; step 0 is the start."""
        events: dict[int, list[TraceEvent]] = {}
        for row in self._rows(TRACE_FILE):
            events.setdefault(row["step"], []).append(trace_event(row))
        return events

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.path / name
        try:
            require_plain_file(file)
            rows = read_jsonl(file) if file.exists() else []
        except OSError as error:
            raise DataError(f"'{file}' cannot be read: {error}.") from error
        for i, row in enumerate(rows, start=1):
            if name != RECOVERIES and not isinstance(row.get("step"), int):
                raise DataError(f"{file}, line {i}: the row has no integer step; remove the line or the file.")
        return rows
