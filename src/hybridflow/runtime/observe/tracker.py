"""Trackers, which receive the metrics of each step."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Metrics = Mapping[str, Any]
"""Metric name -> number; see docs/metrics.md."""


class Tracker(Protocol):
    """A receiver of metrics. `log` is called for each step, in order; when it returns, the metrics are stored.

    A run that goes back after a failure or resumes logs the steps that it repeats again.
    """

    def log(self, step: int, metrics: Metrics) -> None:
        """Store or show the metrics of a step. Values that the tracker does not support are left out."""
        ...

    def close(self) -> None:
        """Write pending data and close files; a second call does nothing."""
        ...


SAMPLE_COLUMNS = ("step", "row", "prompt", "response", "ground_truth", "score", "length", "finish_reason", "failed")
"""What a table of samples has of each."""


def sample_table(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return samples as columns, texts and numbers only."""
    return {name: [_plain(sample.get(name)) for sample in samples] for name in SAMPLE_COLUMNS}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value, default=repr)


class MultiTracker:
    """A tracker that passes all calls to several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, step: int, metrics: Metrics) -> None:
        """Pass the metrics of a step to each tracker."""
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close each tracker."""
        for tracker in self.trackers:
            tracker.close()
