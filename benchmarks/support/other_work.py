"""The share of the machine that other programs used during a measurement; always 0 without /proc."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")


class OtherWork:
    """A measurement of the CPU time of all programs but one process and its children.

    After `with OtherWork(pid) as other: ...`, `other.share` is their share of all CPUs, from 0 to 1.
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self.share = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._before = self._others_s()
        return self

    def __exit__(self, *_: object) -> None:
        available_s = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        self.share = max(0.0, self._others_s() - self._before) / available_s

    def _others_s(self) -> float:
        """Return the CPU seconds of other programs since boot, including those stolen by the host."""
        if not _STAT.exists():
            return 0.0
        user, nice, system, _, _, irq, softirq, steal = map(int, _STAT.read_text().split(maxsplit=9)[1:9])
        own = sum(ticks for _, ticks in _tree(self._process_id))
        return (user + nice + system + irq + softirq + steal - own) / os.sysconf("SC_CLK_TCK")


def _tree(root: int) -> Iterator[tuple[int, int]]:
    """Yield the id and the used CPU ticks of a process and of all its descendants."""
    parents: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # the process has exited meanwhile
            continue
        parents[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    inside = {root}
    while more := {pid for pid, (parent, _) in parents.items() if parent in inside} - inside:
        inside |= more
    return ((pid, parents[pid][1]) for pid in inside if pid in parents)
