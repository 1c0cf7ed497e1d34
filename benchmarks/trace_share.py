"""What the trace takes of each step of a run, which must be little, for it is always on.

    .venv/bin/python benchmarks/trace_share.py runs/mine

Everything that was done for the trace of a step is done again with its events, and timed: making each event, pickling
and unpickling those of workers, recording, the metrics and the rows of the file. A step's share is that, as if it had
all been in the controller's way, of the step's `timing_s/step`.
"""

import argparse
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybridflow.errors import HybridFlowError
from hybridflow.observability import (
    JsonlWriter,
    Trace,
    TraceEvent,
    read_jsonl,
    stage_seconds,
    trace_row,
    transfer_metrics,
)
from hybridflow.trainers.groups import STAGES

LIMIT = 0.01
ROUNDS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the directory of a run")
    run: Path = parser.parse_args().run
    try:
        seconds_of_step = {
            row["step"]: row["timing_s/step"] for row in read_jsonl(run / "metrics.jsonl") if row["step"]
        }
        events_of_step: dict[int, list[TraceEvent]] = {}
        for row in read_jsonl(run / "trace" / "calls.jsonl"):
            events_of_step.setdefault(row.pop("step"), []).append(TraceEvent(**row))
    except HybridFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not seconds_of_step:
        print(f"error: {run} has no steps yet; train some.", file=sys.stderr)
        return 2
    shares, counts, costs = [], [], []
    for step, seconds in seconds_of_step.items():
        events = events_of_step.get(step, [])
        costs.append(statistics.median(seconds_for(events) for _ in range(ROUNDS)))
        shares.append(costs[-1] / seconds)
        counts.append(len(events))
    share = statistics.median(shares)
    print(
        f"{len(shares)} steps, medians: {statistics.median(counts):.0f} events, {statistics.median(costs) * 1e3:.3f} "
        f"ms for them, a step of {statistics.median(seconds_of_step.values()):.3f} s: {share:.3%}"
    )
    if share > LIMIT:
        print(f"more than the {LIMIT:.0%} that are wanted")
    row = {"name": "share", "unit": "1", "ours": share, "peer": None, "limit": LIMIT, "ratio": LIMIT / share}
    print(json.dumps({"benchmark": "trace_share", "rows": [row]}))
    return 0


def seconds_for(events: Sequence[TraceEvent]) -> float:
    """All that is done for these events."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory:
        writer = JsonlWriter(Path(directory) / "calls.jsonl")
        start = time.perf_counter()
        for event in events:
            made = TraceEvent(*event)
            if made.kind == "call":
                made = pickle.loads(pickle.dumps(made, protocol=5))._replace(sources=event.sources)
            trace.record(made)
        taken = trace.take()
        stage_seconds(taken, STAGES)
        transfer_metrics(taken)
        writer.write_all({"step": 1, **trace_row(event)} for event in taken)
        seconds = time.perf_counter() - start
        writer.close()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
