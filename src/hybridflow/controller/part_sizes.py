"""Sizes of the parts of a batch by measured speed: a rank that was slow in recent calls of a method gets fewer rows."""

from collections.abc import Sequence
from typing import Any, Literal

from hybridflow.protocol.handle import Duration

PartsOf = Literal["equal", "measured"]
PARTS = ("equal", "measured")

NEWEST_SHARE = 0.5
"""Weight of the newest call in the moving average of a rank's speed."""


MAX_WAITING = 16
"""Number of unfinished calls that are kept; the oldest beyond it are not measured."""


def even_sizes(num_units: int, num_parts: int) -> list[int]:
    """Return sizes that differ by at most one, the larger ones first."""
    size, larger = divmod(num_units, num_parts)
    return [size + (part < larger) for part in range(num_parts)]


class Parts(list[Any]):
    """A batch that is already split, one element for each part."""


class MeasuredParts:
    """The measured speed of each part's ranks in calls of one method, and part sizes that would take equally long.

    Sizes are in units: one row, or one group of rows. No part is empty, so that every rank continues to be measured.
    """

    def __init__(self, num_parts: int) -> None:
        self._speeds: list[float] = []
        self._num_parts = num_parts
        self._calls: list[tuple[list[int], list[list[Duration]]]] = []

    def note(self, sizes: Sequence[int], durations: Sequence[Sequence[Duration]]) -> None:
        """Record a call that has started: the size of each part, and the durations of the ranks of each part."""
        self._calls = [*self._calls, (list(sizes), [list(of_part) for of_part in durations])][-MAX_WAITING:]

    def sizes(self, num_units: int) -> list[int]:
        """Return the units of each part, at least one; as equal as possible until all parts have been measured.

        `num_units` must be at least the number of parts.
        """
        self._update_speeds()
        speeds = self._speeds or [1.0] * self._num_parts
        quotas = [num_units * speed / sum(speeds) for speed in speeds]
        sizes = [max(1, int(quota)) for quota in quotas]
        while (missing := num_units - sum(sizes)) != 0:
            step = 1 if missing > 0 else -1
            candidates = [part for part in range(self._num_parts) if sizes[part] + step >= 1]
            chosen = max(candidates, key=lambda part: (step * (quotas[part] - sizes[part]), -part))
            sizes[chosen] += step
        return sizes

    def _update_speeds(self) -> None:
        """Update the speeds with the calls that have finished on every rank, in their order."""
        waiting = []
        for sizes, durations in self._calls:
            seconds = [[duration.seconds for duration in of_part] for of_part in durations]
            if any(second is None for of_part in seconds for second in of_part):
                waiting.append((sizes, durations))
                continue
            slowest = [max(second or 0.0 for second in of_part) for of_part in seconds]
            if min(slowest) <= 0.0:
                continue  # too short to be measured
            speeds = [size / second for size, second in zip(sizes, slowest, strict=True)]
            before = self._speeds or speeds
            self._speeds = [
                NEWEST_SHARE * new + (1 - NEWEST_SHARE) * old for new, old in zip(speeds, before, strict=True)
            ]
        self._calls = waiting
