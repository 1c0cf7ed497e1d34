"""The share of a run's step time that its trace takes; it must be small, because the trace is always on.

    make bench-trace_share ARGS=runs/mine

All work for the trace of a step is repeated with its events and timed: creating each event, pickling and unpickling
those of workers, recording, the metrics and the rows of the file. The share is this time over the step's
`timing_s/step`, an upper bound: part of the work does not delay the controller.
"""

import pickle
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from support.arguments import parser_of
from support.echo_task import train, write_task
from support.errors import BenchmarkError
from support.program import run
from support.report import Row, print_rows

from hybridflow.errors import HybridFlowError
from hybridflow.runtime.observe import (
    JsonlWriter,
    Trace,
    TraceEvent,
    read_jsonl,
    stage_seconds,
    trace_row,
    transfer_metrics,
)
from hybridflow.runtime.observe.timing import STAGES

LIMIT = 0.01
ROUNDS = 20


def main() -> None:
    parser = parser_of(__doc__, None, smoke={"rounds": 1})
    parser.add_argument("run", type=Path, nargs="?", help="run directory; required without --smoke")
    parser.set_defaults(rounds=ROUNDS)
    args = parser.parse_args()
    if args.smoke:
        with tempfile.TemporaryDirectory() as directory:
            write_task(Path(directory))
            changes = ["trainer.total_steps=1", "controller.threads=1"]
            return measure(train(Path(directory), "grpo", seed=0, changes=changes), args.rounds, True)
    if args.run is None:
        parser.error("run is missing: expected the directory of a run; or use --smoke.")
    return measure(args.run, args.rounds, False)


def measure(directory: Path, rounds: int, smoke: bool) -> None:
    """Print the share of a run. Raises BenchmarkError if the run has no steps."""
    events_of_step: dict[int, list[TraceEvent]] = {}
    try:
        rows = read_jsonl(directory / "metrics.jsonl")
        for row in read_jsonl(directory / "trace" / "calls.jsonl"):
            events_of_step.setdefault(row.pop("step"), []).append(TraceEvent(**row))
    except HybridFlowError as error:
        raise BenchmarkError(str(error)) from error
    seconds_of_step = {row["step"]: row["timing_s/step"] for row in rows if row["step"]}
    if not seconds_of_step:
        raise BenchmarkError(f"{directory} has no steps; train at least one.")
    shares, counts, costs = [], [], []
    for step, seconds in seconds_of_step.items():
        events = events_of_step.get(step, [])
        costs.append(statistics.median(seconds_for(events) for _ in range(rounds)))
        shares.append(costs[-1] / seconds)
        counts.append(len(events))
    share = statistics.median(shares)
    print(
        f"{len(shares)} steps, medians: {statistics.median(counts):.0f} events, {statistics.median(costs) * 1e3:.3f} "
        f"ms for the trace, a step of {statistics.median(seconds_of_step.values()):.3f} s: {share:.3%}"
    )
    if share > LIMIT:
        print(f"the share is above the limit of {LIMIT:.0%}")
    print_rows("trace_share", [Row("share", "1", share, None, LIMIT, LIMIT / share)], smoke=smoke)


def seconds_for(events: Sequence[TraceEvent]) -> float:
    """Return the seconds of all work for these events."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory:
        writer = JsonlWriter(Path(directory) / "calls.jsonl")
        start = time.perf_counter()
        for event in events:
            copy = TraceEvent(*event)
            if copy.kind == "call":
                copy = pickle.loads(pickle.dumps(copy, protocol=5))._replace(sources=event.sources)
            trace.record(copy)
        taken = trace.take()
        stage_seconds(taken, STAGES)
        transfer_metrics(taken)
        writer.write_all({"step": 1, **trace_row(event)} for event in taken)
        seconds = time.perf_counter() - start
        writer.close()
    return seconds


if __name__ == "__main__":
    run(main)
