"""The idle share of the processes of each role in a step, from the calls that they ran."""

from collections.abc import Iterable, Mapping

from hybridflow.observability.trace import TraceEvent, union_seconds


def idle_shares(
    events: Iterable[TraceEvent],
    running: Iterable[tuple[str, float]],
    roles: Mapping[str, tuple[str, int]],
    start: float,
    end: float,
) -> dict[str, float]:
    """Return `perf/<role>_idle_share`: the share of the time from `start` to `end` without a call, over processes.

    `running`: worker and start of each call that is not in `events` because it has not finished. `roles`: pool of each
    role and number of its processes; the roles of a pool share them. Times are seconds of `time.time()`.
    """
    calls = [(event.worker, event.start, event.end) for event in events if event.kind == "call"]
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {pool: {} for pool, _ in roles.values()}
    for worker, begins, ends in [*calls, *((worker, since, end) for worker, since in running)]:
        role, _, rank = worker.rpartition("/")
        clipped = max(begins, start), min(ends, end)
        if role in roles and clipped[0] < clipped[1]:
            spans[roles[role][0]].setdefault(rank, []).append(clipped)
    busy_s = {pool: sum(map(union_seconds, of_process.values())) for pool, of_process in spans.items()}
    return {
        f"perf/{role}_idle_share": 1 - busy_s[pool] / (num_processes * (end - start))
        for role, (pool, num_processes) in roles.items()
    }
