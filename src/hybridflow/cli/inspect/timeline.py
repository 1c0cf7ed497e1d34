"""The timeline of a run, from its trace: who waited for whom, and what each process did when.

Gaps between the calls of a process are those that the process measured itself (`TraceEvent.waited_s`).
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridflow.cli.inspect.critical_path import critical_path
from hybridflow.runtime.observe.timing import STAGES, WEIGHT_SYNC, union_seconds
from hybridflow.runtime.observe.trace import CONTROLLER, TraceEvent

Events = Mapping[int, Sequence[TraceEvent]]
"""The events of a run by step, as `RunFiles.events`."""


class ProcessTime(NamedTuple):
    """The time of a process by use, in seconds. `waited_for`: waiting time by cause, longest first.

    That is a call on another worker ("update_actor on actor_rollout/0"), "controller" or "recovery".
    """

    process: str
    computing_s: float
    waiting_s: float
    waited_for: dict[str, float]


class Span(NamedTuple):
    """A bar of the timeline, in seconds of `time.time()`. `category`: the kind of event, "weight_sync" or "idle"."""

    start: float
    end: float
    name: str
    category: str
    args: dict[str, Any]


class Lane(NamedTuple):
    """A row of the timeline: spans of one process that do not overlap, or what the controller did."""

    node: str
    name: str
    spans: list[Span]


def events_until(events: Events, step: int) -> list[TraceEvent]:
    """Return the events of a step and the next one, in whose events are calls that ended and gaps that began here."""
    following = next((other for other in sorted(events) if other > step), step)
    return [event for other in dict.fromkeys((step, following)) for event in events.get(other, ())]


def who_waited(events: Iterable[TraceEvent], start: float, end: float) -> list[ProcessTime]:
    """Return the time of each process between two times, and whom it waited for.

    A gap is waited for the calls of other processes that are on the critical path to its end, the rest of it for the
    controller.
    """
    calls = [event for event in events if event.kind == "call"]
    ended = sorted((event for event in events if event.kind in ("call", "recovery")), key=lambda event: event.end)
    ends = [event.end for event in ended]
    times = []
    for process in sorted({event.process for event in calls}):
        own = [event for event in calls if event.process == process]
        waited_for: dict[str, float] = {}
        for gap_start, gap_end in _clipped(map(_gap, own), start, end):
            during = ended[bisect_right(ends, gap_start) : bisect_right(ends, gap_end)]
            others = [event for event in during if event.kind != "call" or event.process != process]
            for segment in critical_path(others, gap_start, gap_end).segments:
                is_call = segment.stage not in (CONTROLLER, "recovery")
                name = f"{segment.stage} on {segment.worker}" if is_call else segment.stage
                waited_for[name] = waited_for.get(name, 0.0) + segment.seconds
        computing_s = union_seconds(_clipped([(event.start, event.end) for event in own], start, end))
        by_length = dict(sorted(waited_for.items(), key=lambda item: -item[1]))
        times.append(ProcessTime(process, computing_s, sum(waited_for.values()), by_length))
    return times


def total_times(parts: Iterable[Sequence[ProcessTime]]) -> list[ProcessTime]:
    """Return the times of each process over several parts of a run, such as steps, between which time may lie."""
    of_process: dict[str, list[ProcessTime]] = {}
    for times in parts:
        for each in times:
            of_process.setdefault(each.process, []).append(each)
    totals = []
    for process, own in sorted(of_process.items()):
        waited_for: dict[str, float] = {}
        for name, seconds in (item for each in own for item in each.waited_for.items()):
            waited_for[name] = waited_for.get(name, 0.0) + seconds
        by_length = dict(sorted(waited_for.items(), key=lambda item: -item[1]))
        computing_s, waiting_s = sum(each.computing_s for each in own), sum(each.waiting_s for each in own)
        totals.append(ProcessTime(process, computing_s, waiting_s, by_length))
    return totals


def lanes(events: Events) -> list[Lane]:
    """Return the rows of the timeline: those of the controller, then those of each process, by node."""
    rows: dict[tuple[str, str], list[Span]] = {}
    for step, of_step in sorted(events.items()):
        for event in of_step:
            rows.setdefault(_row_of(event), []).append(_span_of(event, step))
    for row, spans in rows.items():
        if row[0] != CONTROLLER:
            spans += _idle_spans(spans)
    ordered = sorted(rows.items(), key=lambda item: (item[0][0] != CONTROLLER, item[0]))
    return [
        Lane(node, name if number == 0 else f"{name} ({number + 1})", lane)
        for (node, name), spans in ordered
        for number, lane in enumerate(_side_by_side(spans))
    ]


def chrome_trace(events: Events) -> dict[str, Any]:
    """Return the events in the Chrome trace-event format, which ui.perfetto.dev and chrome://tracing open.

    A node is a process there, and a worker process a thread of it. Times are microseconds since the first event.
    """
    rows = lanes(events)
    nodes = list(dict.fromkeys(lane.node for lane in rows))
    zero = min((span.start for lane in rows for span in lane.spans), default=0.0)
    written: list[dict[str, Any]] = [_name("process_name", pid, 0, node) for pid, node in enumerate(nodes, start=1)]
    for tid, lane in enumerate(rows, start=1):
        pid = nodes.index(lane.node) + 1
        written.append(_name("thread_name", pid, tid, lane.name))
        written += [_written(span, pid, tid, zero) for span in lane.spans]
    return {"traceEvents": written, "displayTimeUnit": "ms", "otherData": {"start": zero}}


def _gap(event: TraceEvent) -> tuple[float, float]:
    """Return the time before a call in which its process ran no other."""
    return event.start - event.waited_s, event.start


def _clipped(spans: Iterable[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    clipped = [(max(begin, start), min(stop, end)) for begin, stop in spans]
    return [(begin, stop) for begin, stop in clipped if begin < stop]


def _row_of(event: TraceEvent) -> tuple[str, str]:
    """Return node and name of the row of an event."""
    if event.kind == "call":
        return event.node, event.process
    return CONTROLLER, {"recovery": "recovery", "parts": "parts", "step": "steps"}.get(event.kind, "transfers")


def _span_of(event: TraceEvent, step: int) -> Span:
    fields = ("worker", "waited_s", "transfer_s", "bytes_in", "bytes_out", "memory_bytes", "note", "where")
    args = {"step": step, **{name: getattr(event, name) for name in fields if getattr(event, name)}}
    if event.sources:
        args["sources"] = {maker: list(columns) for maker, columns in event.sources}
    name = f"step {step}" if event.kind == "step" else event.method
    if event.kind in ("send", "read"):
        name = f"{event.kind} {name}"
    is_sync = event.kind == "call" and STAGES.get(event.method) in WEIGHT_SYNC
    return Span(event.start, event.end, name, "weight_sync" if is_sync else event.kind, args)


def _idle_spans(calls: Sequence[Span]) -> list[Span]:
    """Return the gaps before the calls of a process, cut where clocks disagree, so that they overlap with no call."""
    gaps, reached = [], float("-inf")
    for call in sorted(calls, key=lambda span: span.start):
        waited_s = call.args.get("waited_s", 0.0)
        start = max(call.start - waited_s, reached)
        if waited_s and start < call.start:
            gaps.append(Span(start, call.start, "idle", "idle", {"step": call.args["step"], "waited_s": waited_s}))
        reached = max(reached, call.end)
    return gaps


def _side_by_side(spans: Iterable[Span]) -> list[list[Span]]:
    """Return the spans as lists in which none overlap, as few as needed."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _written(span: Span, pid: int, tid: int, zero: float) -> dict[str, Any]:
    event = {"name": span.name, "cat": span.category, "pid": pid, "tid": tid, "ts": _us(span.start - zero)}
    if span.category == "parts":
        return {**event, "ph": "i", "s": "t", "args": span.args}
    return {**event, "ph": "X", "dur": max(_us(span.end - zero) - event["ts"], 0), "args": span.args}


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
