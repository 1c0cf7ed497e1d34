"""The trace of a run: each call on a worker and each transfer, with start, end and bytes.

It is always on: recording an event appends one small object. Files, metrics and reports are made from it later.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from hybridflow.errors import DataError

Kind = Literal["call", "send", "read", "probe", "recovery", "parts", "step"]

Sources = tuple[tuple[str, tuple[str, ...]], ...]

TRACE_FILE = "trace/calls.jsonl"
"""The trace of a run, in its directory."""

CONTROLLER = "controller"
"""The name of the driver as producer or reader of columns."""

DRIVER = "driver"
"""Name of the controller's process, for calls that run in it."""


class TraceEvent(NamedTuple):
    """One call on a worker, or one transfer of the controller.

    `kind`: "call", a method on one rank; "send", the controller packed the arguments of a call and put them into the
    store; "read", the controller read contents; "probe", a measurement of a node; "recovery", a failure that was
    mended, with the restarted groups as `worker` and the action as `where`;
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


def trace_row(event: TraceEvent) -> dict[str, Any]:
    """Return an event as a row of a JSON-lines file."""
    return event._asdict()


def trace_event(row: Mapping[str, Any]) -> TraceEvent:
    """Return the event of a row from `trace_row`. Raises DataError if the row is not one."""
    try:
        values: dict[str, Any] = {name: row[name] for name in TraceEvent._fields}
        values |= {name: float(values[name]) for name in ("start", "end", "transfer_s", "waited_s")}
        values["sources"] = tuple((str(made), tuple(map(str, names))) for made, names in row["sources"])
        for name in ("kind", "where", "worker", "node", "note", "process"):
            if not isinstance(values[name], str):
                raise TypeError(f"{name} is not a text")
        values |= {name: int(values[name]) for name in ("bytes_in", "bytes_out", "memory_bytes")}
        return TraceEvent(**values)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{str(row)[:200]} is not an event of a trace ({error!r}).") from error
