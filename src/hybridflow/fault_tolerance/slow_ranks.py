"""Ranks that have become many times slower than their peers: when to measure them, and which of them to name.

    step takes N times the median ── measure all ranks ── N times slower than the median of the peers? ── name it

Such a rank is alive and its numbers are right, so nothing is restarted. Durations are wall time and must reach logs and
metrics only.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

Rank = tuple[str, int]
"""The name of a group, and a rank of it."""

FEWEST_STEPS, MOST_STEPS = 5, 20
"""Number of ordinary steps whose median is compared with a step."""

STEPS_BETWEEN_PROBES = 10


class SlowRanks:
    """The ordinary durations of the steps of a run, and the ranks that are known to be slow.

    An episode of a rank begins when it is found slow, and ends with a step of ordinary duration, or when a later probe
    finds it no longer slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._ordinary_s: deque[float] = deque(maxlen=MOST_STEPS)
        self._last_probe: int | None = None
        self._probed_s = 0.0
        self._known: set[Rank] = set()

    def note_step(self, step: int, seconds: float) -> float | None:
        """Return how many times the median the step took if a probe is due: measure the ranks, call `note_probe`.

        Slow steps do not change the median, so that a rank that stays slow is not taken as ordinary.
        """
        times = seconds / median(self._ordinary_s) if len(self._ordinary_s) >= FEWEST_STEPS else 0.0
        if times < self._factor:
            self._ordinary_s.append(seconds)
            self._known.clear()
            return None
        if self._last_probe is not None and step < self._last_probe + STEPS_BETWEEN_PROBES:
            return None
        self._last_probe, self._probed_s = step, seconds
        return times

    def note_probe(self, slow: Iterable[Rank]) -> list[Rank]:
        """Note the ranks that the probe found slow; return those whose episode begins.

        If there are none, the step was long for another reason, such as longer responses, and counts as ordinary.
        """
        found = list(slow)
        begun = [rank for rank in found if rank not in self._known]
        self._known = set(found)
        if not found:
            self._ordinary_s.append(self._probed_s)
        return begun


def find_slow_ranks(speeds: Mapping[Rank, float], factor: float) -> dict[Rank, float]:
    """Return the ranks whose speed times `factor` is below the median of their peers, with their share of this median.

    The peers of a rank are the other ranks of its group: of two ranks, the slow one would halve a median of both. A
    rank without peers and a rank with speed 0, which was not measured, are left out.
    """
    slow: dict[Rank, float] = {}
    for (group, rank), speed in speeds.items():
        peers = [of for other, of in speeds.items() if other[0] == group and other[1] != rank and of > 0]
        if speed > 0 and peers and speed * factor < median(peers):
            slow[group, rank] = speed / median(peers)
    return slow
