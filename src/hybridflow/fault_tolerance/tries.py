"""How often a run may fail at one place before it stops, and the pauses in between."""

import random
from collections.abc import Callable

_draw = random.SystemRandom().random  # decides only when to go on

LONGEST_PAUSE_S = 600.0
"""Seconds at which the pause stops to double."""

JITTER = 0.25
"""Pauses vary by this share, so that runs that failed together do not return together."""


class Tries:
    """The failures since the last completed step, and the pause before each further try.

    `pause_s`: before the second try; it doubles with each further one. `draw()` returns a number from 0 to 1.
    """

    def __init__(self, most: int, pause_s: float, draw: Callable[[], float] = _draw) -> None:
        self._most, self._pause_s, self._draw = most, pause_s, draw
        self._furthest = -1
        self.count = 0

    def note_step(self, step: int) -> None:
        """Count from 0 again if the run has come further than at any earlier failure."""
        if step > self._furthest:
            self.count = 0

    def is_exhausted(self) -> bool:
        """Return whether there is no try left."""
        return self.count >= self._most

    def next_pause_s(self, step: int) -> float:
        """Count a failure at `step`; return the seconds to wait before the next try."""
        self._furthest = max(self._furthest, step)
        self.count += 1
        if self.count == 1:
            return 0.0
        doubled_s = self._pause_s * 2.0 ** min(self.count - 2, 100)
        return min(doubled_s, max(LONGEST_PAUSE_S, self._pause_s)) * (1 + JITTER * (2 * self._draw() - 1))
