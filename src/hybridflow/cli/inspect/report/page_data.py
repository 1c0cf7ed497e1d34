"""The data of a page, as plain JSON: what a run's files hold, in the form in which the page shows it fastest.

Numbers of all responses are lists over the rows; texts that repeat are codes into a list. Of the samples with tokens,
at most MAX_SAMPLES are in the page: those whose reward failed, then the best, the worst and the latest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridflow.cli.inspect.critical_path import critical_path, path_line, step_span
from hybridflow.cli.inspect.run_table import run_row
from hybridflow.cli.inspect.timeline import Lane, ProcessTime, events_until, lanes, who_waited
from hybridflow.runtime.observe.advice import find_advice
from hybridflow.runtime.observe.console import DPO_FIGURES, REWARD_MODEL_FIGURES, RL_FIGURES, SFT_FIGURES
from hybridflow.runtime.observe.metrics import Metric, find_metric
from hybridflow.runtime.observe.run_files import ROLLOUT_TEXTS, SAMPLES, RunFiles
from hybridflow.runtime.observe.timing import STAGES

NUM_STEPS = 10
"""Newest steps that the page draws."""

MAX_SPANS = 4000
"""Spans of a step that the page draws: the longest ones."""

MOST_NAMED = 3
"""Whom a process waited for, in its row."""

MAX_SAMPLES = 2000
"""Samples with texts and tokens in the page of a run."""

MAX_CHARS = 2_000_000
"""Characters of a text in the page; a longer one is cut there, and says so."""

OF_ADVICE = ("metric", "seen", "why", "change", "is_note")
NUMBERS = ("score", "length", "staleness")

FIGURES = (RL_FIGURES, SFT_FIGURES, DPO_FIGURES, REWARD_MODEL_FIGURES)
"""The figures of a run by label, as the console has them; those of a kind of run of which it has a metric."""


def page_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the data of the page of some runs; raises DataError if a file of one is damaged."""
    data = [run_data(run) for run in runs]
    names = sorted({name for run in data for name in run["curves"]["values"]})
    metrics = {name: _meaning(metric) for name in names if (metric := find_metric(name))}
    return {"runs": data, "metrics": metrics}


def _meaning(metric: Metric) -> list[str]:
    """Return the description of a metric with its unit, and when to worry."""
    has_unit = metric.unit not in ("1", "count", "score", "steps")
    return [f"{metric.description}{f' Unit: {metric.unit}.' if has_unit else ''}", metric.worry]


def run_data(run: RunFiles) -> dict[str, Any]:
    """Return the data of one run. While it goes on, all of it is that of the steps whose metrics are written."""
    state, curves = run_row(run.path).state, _curves(run)  # read first, see `known`
    last_step = max(curves["steps"], default=0)

    def known(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [row for row in rows if state != "running" or row["step"] <= last_step]

    return {
        "name": run.name,
        "starts": [_plain({name: value for name, value in start.items() if name != "config"}) for start in run.starts],
        "config": _plain(run.shown_config),
        "state": state,
        "curves": curves,
        "figures": {label: name for of_kind in FIGURES for label, name in of_kind.items() if name in curves["values"]},
        "rollouts": _rollouts(known(run.rollouts)),
        "samples": [_plain(sample) for sample in _kept(known(run.samples))],
        "recoveries": [_plain(row) for row in run.recoveries],
        "total_steps": run.starts[-1].get("total_steps", 0),
        "timeline": page_timeline(run),
        "advice": [
            {"title": f"{each.name} ({each.where})", **{name: getattr(each, name) for name in OF_ADVICE}}
            for each in find_advice(run)
        ],
    }


def _curves(run: RunFiles) -> dict[str, Any]:
    """Return the steps, and for each metric its values at these steps; a step that is written twice counts once."""
    rows = {row["step"]: row for row in run.metrics}
    steps = sorted(rows)
    names = sorted({name for row in rows.values() for name in row if name != "step"})
    return {
        "steps": steps,
        "values": {name: [_number(rows[step].get(name)) for step in steps] for name in names},
        "not_finite": {
            name: bad for name in names if (bad := [step for step in steps if _is_not_finite(rows[step].get(name))])
        },
    }


def _rollouts(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of all responses: `step`, `row` and NUMBERS as lists, ROLLOUT_TEXTS as codes into `texts`."""
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "row", "group", *NUMBERS, *ROLLOUT_TEXTS)}
    codes: dict[str, dict[str, int]] = {name: {} for name in ROLLOUT_TEXTS}
    for row in rows:
        count = len(row["score"])
        columns["step"] += [row["step"]] * count
        columns["row"] += map(_number, row.get("row", range(count)))
        columns["group"] += map(_number, row.get("group", [-1] * count))
        for name in NUMBERS:
            columns[name] += map(_number, row.get(name, [None] * count))
        for name in ROLLOUT_TEXTS:
            known = codes[name]
            columns[name] += [known.setdefault(_text(value), len(known)) for value in row.get(name, [""] * count)]
    return {**columns, "texts": {name: list(known) for name, known in codes.items()}}


def _kept(samples: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the samples of the page, in the order of the file."""
    if len(samples) <= MAX_SAMPLES:
        return samples
    rows = range(len(samples))
    scores = [_number(sample.get("score")) for sample in samples]
    ranked = sorted((row for row in rows if scores[row] is not None), key=lambda row: scores[row] or 0.0)
    share = MAX_SAMPLES // 4
    failed = [row for row in rows if samples[row].get("failed")]
    order = [*reversed(failed[-share:]), *ranked[-share:], *ranked[:share], *reversed(rows)]
    return [samples[row] for row in sorted(list(dict.fromkeys(order))[:MAX_SAMPLES])]


def _plain(value: Any) -> Any:
    """Return a value of a file without numbers that JSON lacks, and with texts cut to MAX_CHARS."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, str):
        return _text(value)
    return str(value) if _is_not_finite(value) else value


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... cut: {len(text)} characters in {SAMPLES}"


def _number(value: Any) -> float | int | None:
    """Return a finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or _is_not_finite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.7g}")


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def page_timeline(run: RunFiles) -> list[dict[str, Any]]:
    """Return line, shares, waits and lanes of each of the newest steps; times are seconds since the step's start."""
    lengths = {row["step"]: row.get("length", ()) for row in run.rollouts}
    drawn = []
    for step in sorted(run.events)[-NUM_STEPS:]:
        events, (start, end) = events_until(run.events, step), step_span(run.events[step])
        path = critical_path(events, start, end)
        drawn.append(
            {
                "step": step,
                "seconds": end - start,
                "line": path_line(step, path, lengths.get(step, ())),
                "shares": {stage: round(share, 5) for stage, share in path.shares().items()},
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
            "spans": [
                [round(since, 6), round(until, 6), STAGES.get(name, name), category]
                for place, since, until, name, category in sorted(parts)
                if place == row
            ],
        }
        for row, lane in enumerate(rows)
        if any(part[0] == row for part in parts)
    ]
