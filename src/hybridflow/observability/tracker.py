"""Trackers, which receive the metrics of each step."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Metrics = Mapping[str, Any]
"""Metric name -> number; see docs/metrics.md."""


class Tracker(Protocol):
    """A receiver of metrics. `log` is called once per step, in order; when it returns, the metrics are stored."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Store or show the metrics of a step. Values that the tracker does not support are left out."""
        ...

    def close(self) -> None:
        """Write pending data and close files; a second call does nothing."""
        ...


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
