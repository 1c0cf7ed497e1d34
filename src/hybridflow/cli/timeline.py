"""Show what the steps of a run waited for: the critical path of each step, and which process waited for which.

Read from `trace/calls.jsonl` of the run directory, also while the run goes on. The critical path is found from the end
of a step backwards: the call that ended last, the one that ended last before it began, and so on. --output writes every
call, transfer, weight sync, recovery and gap for a timeline that ui.perfetto.dev draws. Step 0 is the start.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.arguments import add_steps
from hybridflow.cli.output import aligned
from hybridflow.errors import DataConfigError
from hybridflow.runtime.observe.run_files import printable

if TYPE_CHECKING:
    from hybridflow.runtime.observe.run_files import RunFiles

NUM_STEPS = 10
"""Newest steps that are shown without --steps."""

MOST_NAMED = 3
"""Whom a process waited for, in a line of the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run directory, the steps, the trace file and the format."""
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    add_steps(parser, f"the last {NUM_STEPS}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write a Chrome trace of these steps, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds")


def run(args: argparse.Namespace) -> int:
    """Print critical paths and waits; write the Chrome trace."""
    from hybridflow.cli.inspect.timeline import chrome_trace
    from hybridflow.cli.output import write_derived_file
    from hybridflow.runtime.observe.run_files import RunFiles

    files = RunFiles(args.run)
    steps = sorted(files.events)
    steps = steps[-NUM_STEPS:] if args.steps is None else [step for step in steps if step in args.steps]
    if not steps:
        raise DataConfigError(f"the trace of '{args.run}' has no event of these steps; metrics.jsonl shows its steps.")
    report = _report(files, steps)
    print(json.dumps(report, indent=1) if args.json else "\n".join(_lines(report)))
    if args.output:
        trace = json.dumps(chrome_trace({step: files.events[step] for step in steps}))
        write_derived_file(args.output, trace + "\n", [files])
        if not args.json:
            print(f"\ntrace: {printable(args.output)}; open it at https://ui.perfetto.dev, which reads it from disk")
    return 0


def _report(files: "RunFiles", steps: Sequence[int]) -> dict[str, Any]:
    """Return the line and the path of each step, and the waits of all of them."""
    from hybridflow.cli.inspect.critical_path import critical_path, path_line, step_span
    from hybridflow.cli.inspect.timeline import events_until, total_times, who_waited

    lengths = {row["step"]: row.get("length", ()) for row in files.rollouts}
    paths = {step: critical_path(events_until(files.events, step), *step_span(files.events[step])) for step in steps}
    of_steps = [who_waited(events_until(files.events, step), path.start, path.end) for step, path in paths.items()]
    return {
        "steps": [
            {
                "step": step,
                "seconds": path.seconds,
                "line": path_line(step, path, lengths.get(step, ())),
                "path": [{**segment._asdict(), "seconds": segment.seconds} for segment in path.segments],
            }
            for step, path in paths.items()
        ],
        "processes": [times._asdict() for times in total_times(of_steps)],
    }


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [printable(step["line"]) for step in report["steps"]]
    head = ["process", "computing (s)", "waiting (s)", "waited for"]
    rows = [
        [
            printable(times["process"]),
            f"{times['computing_s']:.2f}",
            f"{times['waiting_s']:.2f}",
            "; ".join(
                f"{seconds:.2f} s {printable(name)}" for name, seconds in list(times["waited_for"].items())[:MOST_NAMED]
            ),
        ]
        for times in report["processes"]
    ]
    return [*lines, *(["", *aligned([head, *rows], ends_with_text=True)] if rows else [])]
