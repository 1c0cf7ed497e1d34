"""The runs of a directory, a row each, from the ends of their files: long files are not read whole."""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hybridflow.errors import HybridFlowError
from hybridflow.observability.jsonl import read_last_rows
from hybridflow.observability.run_files import METRICS, read_starts

MAX_DEPTH = 4
"""Levels of directories below the one that is searched."""

FIGURES = (
    "critic/score/mean",
    *("sft/val_loss", "dpo/val_accuracy", "reward_model/val_accuracy"),
    *("sft/loss", "dpo/accuracy", "reward_model/accuracy"),
)
"""The figure of a run is the first of these that it has."""

LAST_ROWS = 50
"""Rows at the end of metrics.jsonl in which figures are looked for; a validation may be many steps ago."""

State = Literal["running", "finished", "stopped", "unreadable"]


@dataclass(frozen=True)
class RunRow:
    """A run: its directory, kind ("train", "sft", ...), recipe, last step and all steps (0: not known), and figures.

    `state`: "stopped" if it can be continued. `started` and `written` are seconds of `time.time()`, 0 if not known.
    `problem`: why it is unreadable.
    """

    path: Path
    kind: str = ""
    recipe: str = ""
    step: int = 0
    total_steps: int = 0
    figure: str = ""
    value: float | None = None
    val_score: float | None = None
    state: State = "unreadable"
    started: float = 0.0
    written: float = 0.0
    problem: str = ""


def list_runs(directory: Path) -> list[RunRow]:
    """Return the runs in a directory and at most MAX_DEPTH levels below it, sorted by path. Links are not followed."""
    return [run_row(path) for path in _run_directories(directory)]


def _run_directories(directory: Path) -> Iterator[Path]:
    for path, names, files in os.walk(directory):
        if "run.json" in files:
            yield Path(path)
        depth = len(Path(path).relative_to(directory).parts)
        names[:] = sorted(names) if "run.json" not in files and depth < MAX_DEPTH else []


def run_row(path: Path) -> RunRow:
    """Return the row of the run in a directory; one that cannot be read says why."""
    try:
        starts = read_starts(path)
        start: Mapping[str, Any] = starts[-1] if starts and isinstance(starts[-1], dict) else {}
        rows = read_last_rows(path / METRICS, LAST_ROWS) if (path / METRICS).is_file() else []
        steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    except (HybridFlowError, OSError) as error:
        return RunRow(path, problem=str(error))
    figure = next((name for name in FIGURES if any(name in row for row in rows)), "")
    step, total_steps = max(steps, default=0), start.get("total_steps", 0)
    command = start.get("command")
    return RunRow(
        path,
        kind=str(start.get("kind", "")),
        recipe=_recipe(command) if isinstance(command, list) else "",
        step=step,
        total_steps=total_steps if isinstance(total_steps, int) else 0,
        figure=figure,
        value=_last(rows, figure),
        val_score=_last(rows, "val/score/mean"),
        state="running" if _is_locked(path) else "finished" if total_steps and step >= total_steps else "stopped",
        started=_seconds(starts[0].get("started_at") if starts and isinstance(starts[0], dict) else None),
        written=(path / METRICS).stat().st_mtime if rows else 0.0,
    )


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return float(values[-1]) if values else None


def _recipe(command: list[Any]) -> str:
    names = [Path(word).name for word in map(str, command[1:]) if word.endswith(".toml") and "=" not in word]
    return " ".join(names)


def _seconds(text: Any) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0


def _is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of the directory."""
    try:
        lock = os.open(path / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # no lock was ever taken
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


def age(seconds: float, now: float | None = None) -> str:
    """Return how long ago a time of `time.time()` was, in its largest unit, as in "3 h"; "-" for 0."""
    if not seconds:
        return "-"
    past = max(0.0, (time.time() if now is None else now) - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if past >= length:
            return f"{past // length:.0f} {unit}"
    return f"{past:.0f} s"
