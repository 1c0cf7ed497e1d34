"""The use of this machine's cores: by this process and those that it has started, and by other programs."""

import os
import time
from pathlib import Path
from typing import Self

import psutil

STAT = Path("/proc/stat")
BUSY = (0, 1, 2, 5, 6)
"""Columns of /proc/stat that are work: user, nice, system, interrupts and soft interrupts."""

LEAST_OTHERS = 0.25
"""Cores that other programs use, below which they do not matter."""

FULL = 0.85
"""Share of busy cores from which programs wait for each other."""


class CoreUse:
    """The use of the cores since this object was made: `others` is what other programs used, in cores.

    It is 0 where /proc does not say. Processes that this one started and no longer has as descendants count as others.
    """

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self._at, self._busy, self._own = time.monotonic(), self._busy_seconds(), _own_seconds()

    def read(self) -> Self:
        """Set `others`, and `is_full`: whether the cores were in use for nearly all of the time."""
        seconds = max(time.monotonic() - self._at, 1e-6)
        busy = (self._busy_seconds() - self._busy) / seconds
        self.others = max(0.0, busy - (_own_seconds() - self._own) / seconds)
        self.is_full = busy >= FULL * len(self.cores)
        return self

    @property
    def text(self) -> str:
        """A sentence on the cores that other programs use, if they matter; else ""."""
        if self.others < LEAST_OTHERS:
            return ""
        return f"other programs use {self.others:.1f} of {len(self.cores)} cores"

    def _busy_seconds(self) -> float:
        """Return the seconds that the cores of this process have worked, for any program."""
        try:
            lines = [line.split() for line in STAT.read_text().splitlines()]
        except OSError:
            return 0.0
        names = {f"cpu{core}" for core in self.cores}
        ticks = sum(int(line[1 + column]) for line in lines if line[0] in names for column in BUSY)
        return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its descendants, also of those that have ended."""
    own, total = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += times.user + times.system + getattr(times, "children_user", 0) + getattr(times, "children_system", 0)
    return total
