"""The idle share of the processes of a run, from the calls in its trace."""

from collections.abc import Iterable, Mapping

from hybridflow.observability.trace import TraceEvent


class IdleTime:
    """The time in which processes ran no call. `pools`: the pool of each role; roles of one pool share its processes.

    The time of a process is counted from the end of its last call that was known before, so that a call that runs
    beyond the end of a step is counted whole, in the step in which it ends.
    """

    def __init__(self, pools: Mapping[str, str]) -> None:
        self._pools = dict(pools)
        self._counted_until: dict[tuple[str, str], float] = {}
        self._idle_s: dict[str, float] = {}
        self._whole_s: dict[str, float] = {}

    def add(self, events: Iterable[TraceEvent]) -> None:
        """Count the calls among the events; those of one process are compared by the clock of its node."""
        calls = [event for event in events if event.kind == "call" and event.group in self._pools]
        for call in sorted(calls, key=lambda call: call.start):
            pool = self._pools[call.group]
            process = pool, call.worker.rpartition("/")[2]
            until = self._counted_until.get(process, call.start)
            self._idle_s[pool] = self._idle_s.get(pool, 0.0) + max(call.start - until, 0.0)
            self._whole_s[pool] = self._whole_s.get(pool, 0.0) + max(call.end - until, 0.0)
            self._counted_until[process] = max(call.end, until)

    def take(self) -> dict[str, float]:
        """Return `perf/<role>_idle_share` of the time counted since the last call of this method.

        A role whose processes ended no call in this time is left out.
        """
        shares = {
            f"perf/{role}_idle_share": self._idle_s[pool] / self._whole_s[pool]
            for role, pool in self._pools.items()
            if self._whole_s.get(pool)
        }
        self._idle_s.clear()
        self._whole_s.clear()
        return shares
