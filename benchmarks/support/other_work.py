"""How much of the machine other programs used while a side was measured; where Linux does not tell, nothing."""

import os
import time
from pathlib import Path
from typing import Self

_STAT = Path("/proc/stat")


class OtherWork:
    """`with OtherWork(pid) as other: ...`; then `other.share`, of all CPUs, from 0 to 1."""

    def __init__(self, process_id: int) -> None:
        self._process = Path(f"/proc/{process_id}/stat")
        self.share = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._before = self._others_s()
        return self

    def __exit__(self, *_: object) -> None:
        available_s = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        self.share = max(0.0, self._others_s() - self._before) / available_s

    def _others_s(self) -> float:
        """CPU seconds since the start of the machine that were not the process's, stolen ones included."""
        if not (_STAT.exists() and self._process.exists()):
            return 0.0
        user, nice, system, _, _, irq, softirq, steal = map(int, _STAT.read_text().split(maxsplit=9)[1:9])
        of_process = self._process.read_text().rpartition(")")[2].split()[11:13]  # utime, stime
        ticks = user + nice + system + irq + softirq + steal - sum(map(int, of_process))
        return ticks / os.sysconf("SC_CLK_TCK")
