"""Trackers, which receive the metrics of each step."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Protocol

from hybridflow.errors import ConfigError

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


@contextmanager
def needing(package: str, extra: str = "trackers") -> Iterator[None]:
    """Raise ConfigError, with the fix, if the block cannot import the package of a tracker, which has its name."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"trainer.trackers contains '{package}', but the package is not installed; run "
            f"`pip install 'hybridflow[{extra}]'`, or remove it from trainer.trackers."
        ) from error


SAMPLE_COLUMNS = ("step", "row", "prompt", "response", "ground_truth", "score", "length", "finish_reason", "failed")
"""Columns of a tracker's table of samples."""


LARGEST_INTEGER = 2**53
"""Up to here a float, and so every tracker, holds all integers."""


def sample_table(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return samples as columns, texts and numbers only."""
    return {name: [_plain(sample.get(name)) for sample in samples] for name in SAMPLE_COLUMNS}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST_INTEGER):
        return value
    return utf8_text(value if isinstance(value, str) else json.dumps(value, default=repr))


def utf8_text(text: str) -> str:
    """Return a text with "?" for what UTF-8 cannot hold, such as bytes of a file name."""
    return text.encode(errors="replace").decode()


def number_of(value: Any) -> float | None:
    """Return a number, also one of numpy or torch, as a float; None for what is not one, or is beyond all floats."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if isinstance(value, Real) else None
    except Exception:  # an array has several numbers, and a class of the user may fail in any way
        return None


class CleanNumbers:
    """Numbers of metrics by names that a tracker takes. `clean` maps a name; of two equal results one gets a number."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._names: dict[str, str] = {}

    def __call__(self, metrics: Metrics) -> dict[str, float]:
        """Return the numbers; values that are not numbers are left out."""
        numbers = {name: number_of(value) for name, value in metrics.items()}
        return {self._name(name): number for name, number in numbers.items() if number is not None}

    def _name(self, name: str) -> str:
        if name not in self._names:
            clean = self._clean(name)
            others = (clean, *(f"{clean}_{number}" for number in range(2, len(self._names) + 3)))
            self._names[name] = next(each for each in others if each not in self._names.values())
        return self._names[name]


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
