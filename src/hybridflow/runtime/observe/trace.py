"""The trace of a run: each call on a worker and each transfer, with start, end and bytes.

It is always on: recording an event appends one small object. Files, metrics and reports are made from it later.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Literal, NamedTuple

from hybridflow.errors import DataError

Kind = Literal["call", "send", "read", "probe", "recovery", "parts", "step"]

TRANSFERS: frozenset[Kind] = frozenset({"call", "send", "read"})
"""The kinds of events that move columns."""

Sources = tuple[tuple[str, tuple[str, ...]], ...]

TRACE_FILE = "trace/calls.jsonl"
"""The trace of a run, in its directory."""

CONTROLLER = "controller"
"""The name of the driver as producer or reader of columns."""

DRIVER = "driver"
"""The process of calls that run in that of the controller."""


class TraceEvent(NamedTuple):
    """One call on a worker, or one transfer of the controller.

    `kind`: "call", a method on one rank; "send", the controller packed the arguments of a call and put them into the
    store; "read", the controller read contents; "probe", a measurement of a node; "recovery", a failure that was
    mended, with the restarted groups as `worker` and the action as `where`, or a slow rank, with "slow" as `where`;
    "parts", a part of a group that gets another share of the rows from now on, with the reason as `note`; "step", the
    time from the log of the step before to the log of this one.
    `where`: the method. Times are seconds of `time.time()`. `transfer_s`: the part of a call spent on unpacking
    arguments and packing the result. `bytes_in`, `bytes_out`: bytes copied from and to the store. `memory_bytes`:
    resident memory of the worker's process after a call. `sources`: the columns that were read, by producer
    ("controller" or a method). `process`: what ran a call: the roles of a worker process and its rank, or "driver".
    `waited_s`: the time in which that process ran no call before this one, by its own monotonic clock.
    """

    kind: Kind
    where: str
    worker: str
    node: str
    start: float
    end: float
    bytes_in: int = 0
    bytes_out: int = 0
    transfer_s: float = 0.0
    memory_bytes: int = 0
    sources: Sources = ()
    note: str = ""
    process: str = ""
    waited_s: float = 0.0

    @property
    def group(self) -> str:
        """The name of the worker's group."""
        return self.worker.rpartition("/")[0]

    @property
    def method(self) -> str:
        """The method without its class."""
        return self.where.rpartition(".")[2]

    @property
    def bytes_moved(self) -> int:
        """Bytes copied in both directions."""
        return self.bytes_in + self.bytes_out


MAX_EVENTS = 100_000
"""Number of events kept until `take`; older ones are dropped."""


class Trace:
    """The events of a backend in the order in which they were recorded."""

    def __init__(self) -> None:
        self.events: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)
        self._is_paused = False

    def record(self, event: TraceEvent) -> None:
        """Add an event."""
        if not self._is_paused:
            self.events.append(event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no events inside the block."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def take(self) -> list[TraceEvent]:
        """Return the events since the last call and drop them."""
        events = list(self.events)
        self.events.clear()
        return events


def stage_seconds(events: Iterable[TraceEvent], stages: Mapping[str, str]) -> dict[str, float]:
    """Return `timing_s/<stage>` of every called method: the time in which at least one rank ran it.

    `stages` maps a method to its stage if the names differ.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.kind == "call":
            spans.setdefault(stages.get(event.method, event.method), []).append((event.start, event.end))
    return {f"timing_s/{stage}": union_seconds(of_stage) for stage, of_stage in spans.items()}


def transfer_metrics(events: Iterable[TraceEvent]) -> dict[str, float]:
    """Return `transfer/...` of a step: bytes of the workers, bytes sent and read by the controller, and seconds."""
    events = [event for event in events if event.kind in TRANSFERS]
    calls = [event for event in events if event.kind == "call"]
    return {
        "transfer/bytes_flowed": sum(event.bytes_moved for event in calls),
        "transfer/bytes_sent": sum(event.bytes_out for event in events if event.kind == "send"),
        "transfer/bytes_read": sum(event.bytes_in for event in events if event.kind == "read"),
        "transfer/seconds": sum(_transfer_seconds(event) for event in events),
    }


def transfer_report(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """Return transfer statistics in total, per worker and per measured node.

    The keys are `total_transfer_time` (seconds), `total_data_transferred` (bytes), `average_throughput` (bytes/s);
    `workers`, each with `time`, `memory`, `data_size` and `throughput`; `nodes`, each with `latency` (seconds of a
    round trip) and `bandwidth` (bytes/s from the driver's store).
    """
    workers: dict[str, dict[str, float]] = {}
    events = list(events)
    for event in events:
        if event.kind not in TRANSFERS:
            continue
        entry = workers.setdefault(event.worker, {"time": 0.0, "memory": 0, "data_size": 0})
        entry["time"] += _transfer_seconds(event)
        entry["data_size"] += event.bytes_moved
        entry["memory"] = max(entry["memory"], event.memory_bytes)
    for entry in workers.values():
        entry["throughput"] = entry["data_size"] / entry["time"] if entry["time"] else 0.0
    seconds = sum(entry["time"] for entry in workers.values())
    size = sum(entry["data_size"] for entry in workers.values())
    return {
        "total_transfer_time": seconds,
        "total_data_transferred": size,
        "average_throughput": size / seconds if seconds else 0.0,
        "workers": dict(sorted(workers.items())),
        "nodes": _node_statistics([event for event in events if event.kind == "probe"]),
    }


def _node_statistics(probes: Sequence[TraceEvent]) -> dict[str, dict[str, float]]:
    """Return the median latency and bandwidth of each node."""
    statistics = {}
    for node in sorted({event.node for event in probes}):
        of_node = [event for event in probes if event.node == node]
        latencies = [event.end - event.start for event in of_node if not event.bytes_in]
        bandwidths = [event.bytes_in / max(event.end - event.start, 1e-9) for event in of_node if event.bytes_in]
        statistics[node] = {"latency": median(latencies), "bandwidth": median(bandwidths)}
    return statistics


def trace_row(event: TraceEvent) -> dict[str, Any]:
    """Return an event as a row of a JSON-lines file."""
    return event._asdict()


MAX_TIME_S = 1e12
"""Seconds of a clock, some 30,000 years."""


def trace_event(row: Mapping[str, Any]) -> TraceEvent:
    """Return the event of a row from `trace_row`. Raises DataError if the row is not one."""
    try:
        values: dict[str, Any] = {name: row[name] for name in TraceEvent._fields}
        values |= {name: float(values[name]) for name in ("start", "end", "transfer_s", "waited_s")}
        values["sources"] = tuple((str(made), tuple(map(str, names))) for made, names in row["sources"])
        for name in ("kind", "where", "worker", "node", "note", "process"):
            if not isinstance(values[name], str):
                raise TypeError(f"{name} is not a text")
        if not all(abs(values[name]) < MAX_TIME_S for name in ("start", "end", "transfer_s", "waited_s")):  # or NaN
            raise ValueError("a time is not finite, or has no meaning")
        values |= {name: int(values[name]) for name in ("bytes_in", "bytes_out", "memory_bytes")}
        return TraceEvent(**values)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{str(row)[:200]} is not an event of a trace ({error!r}).") from error


def _transfer_seconds(event: TraceEvent) -> float:
    return event.transfer_s if event.kind == "call" else event.end - event.start


def union_seconds(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of the spans in seconds."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return covered
