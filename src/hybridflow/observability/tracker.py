"""What receives the metrics of each step."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Metrics = Mapping[str, Any]
"""Metric name -> number; see docs/metrics.md."""


class Tracker(Protocol):
    """A place metrics go to. One `log` per step, steps rising; nothing is lost once `log` has returned."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step. Values that the tracker cannot show are left out."""
        ...

    def close(self) -> None:
        """Write what is left and let go of files; a second call does nothing."""
        ...


class MultiTracker:
    """Passes everything on to several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
