"""The timeline of the newest steps of a run, as the page draws it."""

from typing import Any

from hybridflow.observability.critical_path import critical_path, path_line, step_span
from hybridflow.observability.run_files import RunFiles
from hybridflow.observability.timeline import Lane, ProcessTime, events_until, lanes, who_waited

NUM_STEPS = 10
"""Newest steps that the page draws."""

MAX_SPANS = 4000
"""Spans of a step that the page draws: the longest ones."""

MOST_NAMED = 3
"""Whom a process waited for, in its row."""


def page_timeline(run: RunFiles) -> list[dict[str, Any]]:
    """Return line, waits and lanes of each of the newest steps; times are seconds since the start of the step."""
    lengths = {row["step"]: row.get("length", ()) for row in run.rollouts}
    drawn = []
    for step in sorted(run.events)[-NUM_STEPS:]:
        events, (start, end) = events_until(run.events, step), step_span(run.events[step])
        drawn.append(
            {
                "step": step,
                "seconds": end - start,
                "line": path_line(step, critical_path(events, start, end), lengths.get(step, ())),
                "waited": [_row(times) for times in who_waited(events, start, end)],
                "lanes": _drawn(lanes({step: events}), start, end),
            }
        )
    return drawn


def _row(times: ProcessTime) -> list[Any]:
    waited_for = list(times.waited_for.items())[:MOST_NAMED]
    text = "; ".join(f"{seconds:.2f} s {name}" for name, seconds in waited_for)
    return [times.process, round(times.computing_s, 3), round(times.waiting_s, 3), text]


def _drawn(rows: list[Lane], start: float, end: float) -> list[dict[str, Any]]:
    """Return the rows with the parts of their spans within a step, without gaps and without the step itself."""
    parts = [
        (row, max(span.start, start) - start, min(span.end, end) - start, span.name, span.category)
        for row, lane in enumerate(rows)
        for span in lane.spans
        if span.category not in ("step", "idle")
    ]
    parts = sorted((part for part in parts if part[1] < part[2]), key=lambda part: part[1] - part[2])[:MAX_SPANS]
    return [
        {
            "name": lane.name,
            "spans": [[round(t, 6) for t in part[1:3]] + [*part[3:]] for part in sorted(parts) if part[0] == row],
        }
        for row, lane in enumerate(rows)
        if any(part[0] == row for part in parts)
    ]
