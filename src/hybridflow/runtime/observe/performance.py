"""The transfers of a run, from the trace in its directory."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.observe.jsonl import read_jsonl
from hybridflow.runtime.observe.trace import TRACE_FILE, trace_event, transfer_report

ALL_STEPS = range(2**62)


def performance_report(run_dir: str | Path, steps: Container[Any] = ALL_STEPS) -> dict[str, Any]:
    """Return the `transfer_report` of these steps of a run, and the first and the last of them as `steps`.

    Times are in seconds, sizes in bytes. Step 0 is the start. Raises DataError if the run has no trace of these steps,
    or a damaged one.
    """
    file = Path(run_dir) / TRACE_FILE
    rows = read_jsonl(file)
    for i, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise DataError(f"{file}, line {i}: the row has no integer step; remove the line or the file.")
    rows = [row for row in rows if row["step"] in steps]
    if not rows:
        raise DataConfigError(f"'{file}' has no event of these steps; metrics.jsonl of the run shows its steps.")
    numbers = [row["step"] for row in rows]
    return {"steps": [min(numbers), max(numbers)], **transfer_report(map(trace_event, rows))}
