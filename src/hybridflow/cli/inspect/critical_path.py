"""The critical path of a step: which call, transfer or wait the step was waiting for at each moment.

It is found from the end of the step backwards: the call that ended last is on the path, then the one that ended last
before that one began, and so on. The times between them belong to the controller.
"""

from collections.abc import Iterable, Sequence
from statistics import quantiles
from typing import Literal, NamedTuple

from hybridflow.runtime.observe.timing import STAGES
from hybridflow.runtime.observe.trace import CONTROLLER, TraceEvent

Use = Literal["computing", "transfer", "waiting"]

LEAST_SHOWN = 0.01
"""Share of a step below which the line does not name a stage."""


class Segment(NamedTuple):
    """A part of a critical path. `stage`: as in STAGES, "controller" or "recovery". Times are seconds of `time.time()`.

    `kind`: "computing", the call ran; "transfer", its arguments or its result were packed or unpacked; "waiting", no
    call on the path ran: the controller computed, or a failure was mended.
    """

    stage: str
    worker: str
    kind: Use
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return self.end - self.start


class CriticalPath(NamedTuple):
    """The segments of a step in order of time: each begins where the one before it ends."""

    start: float
    end: float
    segments: tuple[Segment, ...]

    @property
    def seconds(self) -> float:
        """The length of the step in seconds."""
        return self.end - self.start

    def shares(self) -> dict[str, float]:
        """Return the share of the step of each stage, largest first; transfers of all stages are "transfer"."""
        seconds: dict[str, float] = {}
        for segment in self.segments:
            name = "transfer" if segment.kind == "transfer" else segment.stage
            seconds[name] = seconds.get(name, 0.0) + segment.seconds
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: value / self.seconds for name, value in ordered}


def step_span(events: Iterable[TraceEvent]) -> tuple[float, float]:
    """Return start and end of a step, in seconds of `time.time()`, from its events.

    A trace of an older version has no events of kind "step"; the step then is the time of all its events.
    """
    events = list(events)
    spans = [event for event in events if event.kind == "step"] or events
    return min((event.start for event in spans), default=0.0), max((event.end for event in spans), default=0.0)


def critical_path(events: Iterable[TraceEvent], start: float, end: float) -> CriticalPath:
    """Return the critical path from `start` to `end`, in seconds of `time.time()`.

    `events`: those of the step, and of the next step, in whose events calls may be that ended in this one.
    """
    within = [event for event in events if event.start < event.end and event.start < end and event.end > start]
    calls = sorted((event for event in within if event.kind == "call"), key=lambda event: event.end)
    # What the controller does itself may overlap with the call that it begins by it, such as a send.
    others = sorted(
        (e for e in within if e.kind in ("send", "read", "probe", "recovery")), key=lambda event: event.start
    )
    segments: list[Segment] = []
    now = end
    while now > start:
        while calls and calls[-1].end > now:
            calls.pop()
        while others and others[-1].start >= now:
            others.pop()
        last = max((*calls[-1:], *others[-1:]), key=lambda event: min(event.end, now), default=None)
        ended = start if last is None else min(last.end, now)
        if ended < now:
            segments.append(Segment(CONTROLLER, CONTROLLER, "waiting", ended, now))
        if last is not None:
            now = max(last.start, start)
            segments += reversed(_segments_of(last, now, ended))
        else:
            now = start
    return CriticalPath(start, end, tuple(reversed(segments)))


def _segments_of(event: TraceEvent, start: float, end: float) -> list[Segment]:
    """Return the segments of an event of which this much is on the path."""
    if event.kind == "recovery":
        return [Segment("recovery", event.worker, "waiting", start, end)]
    stage = STAGES.get(event.method, event.method)
    if event.kind != "call":
        return [Segment(stage, CONTROLLER, "transfer", start, end)]
    computes = min(start + max(event.transfer_s, 0.0), end)
    parts = [
        Segment(stage, event.worker, "transfer", start, computes),
        Segment(stage, event.worker, "computing", computes, end),
    ]
    return [part for part in parts if part.start < part.end]


def longest_share(lengths: Sequence[float | None]) -> float | None:
    """Return the share of the decoding steps of a batch in which only the longest 1% of its responses still ran.

    `lengths`: tokens of each response. None if that is unknown: for fewer than two, or only empty ones.
    """
    lengths = [length for length in lengths if length is not None]
    if len(lengths) < 2 or max(lengths) <= 0:
        return None
    return (max(lengths) - quantiles(lengths, n=100, method="inclusive")[-1]) / max(lengths)


def path_line(step: int, path: CriticalPath, lengths: Sequence[float | None] = ()) -> str:
    """Return the critical path of a step in one line. `lengths`: tokens of each response of the step, if known."""
    parts, rest, waiting = [], 0.0, longest_share(lengths)
    for stage, share in path.shares().items():
        if share < LEAST_SHOWN:
            rest += share
            continue
        part = f"{share:.0%} {stage}"
        if stage == "gen" and waiting is not None and waiting >= LEAST_SHOWN:
            part += f", of it {waiting:.0%} waiting for the longest 1% of responses"
        parts.append(part)
    if rest >= LEAST_SHOWN:
        parts.append(f"{rest:.0%} other")
    return f"step {step}, {path.seconds:.3g} s: {'; '.join(parts) or 'no time'}"
