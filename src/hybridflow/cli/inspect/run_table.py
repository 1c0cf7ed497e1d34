"""The runs of a directory, a row each, from the ends of their files: long files are not read whole."""

import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hybridflow.config.load import packaged_recipe
from hybridflow.errors import DataError, HybridFlowError
from hybridflow.runtime.observe.jsonl import read_last_rows
from hybridflow.runtime.observe.run_files import METRICS, is_running, known_starts

MAX_DEPTH = 4
"""Levels of directories below the one that is searched."""

FIGURES = {
    "critic/score/mean": "val/score/mean",
    "sft/loss": "sft/val_loss",
    "dpo/accuracy": "dpo/val_accuracy",
    "reward_model/accuracy": "reward_model/val_accuracy",
}
"""The figure of a kind of run in training, and the one in validation."""

KINDS = ("train", "sft", "dpo", "reward-model")

NO_RECIPE, OWN_RECIPE = "defaults", "config.toml"
"""What stands for no recipe; the configuration of the run itself, which says less than the recipe of an earlier start.
"""

LAST_ROWS = 5
"""Rows at the end of metrics.jsonl in which the figure is looked for."""

State = Literal["running", "finished", "stopped", "failed", "unreadable"]


@dataclass(frozen=True)
class RunRow:
    """A run: its directory, kind ("train", "sft", ...), recipe, last step and all steps (0: not known), and figures.

    `figure` and `val_figure` name metrics, `value` and `val_value` are the last ones. `state` as in `_state`.
    `checkpoint_step` is that of the newest checkpoint (0: none), `checkpoint_bytes` the size of all. `started` and
    `written` are seconds of `time.time()`, 0 if not known. `problem`: why it is unreadable.
    """

    path: Path
    kind: str = ""
    recipe: str = ""
    step: int = 0
    total_steps: int = 0
    figure: str = ""
    value: float | None = None
    val_figure: str = ""
    val_value: float | None = None
    state: State = "unreadable"
    checkpoint_step: int = 0
    checkpoint_bytes: int = 0
    started: float = 0.0
    written: float = 0.0
    problem: str = ""


def list_runs(directory: Path) -> list[RunRow]:
    """Return the runs in a directory and at most MAX_DEPTH levels below it, sorted by path. Links are not followed.

    A directory that cannot be listed is a row too, which says why.
    """
    unreadable: list[OSError] = []
    rows = [run_row(path) for path in find_runs(directory, unreadable)]
    rows += [
        RunRow(Path(error.filename), problem=f"cannot be listed: {error.strerror}")
        for error in unreadable
        if not isinstance(error, FileNotFoundError)  # it was removed meanwhile
    ]
    return sorted(rows, key=lambda row: row.path)


def find_runs(directory: Path, unreadable: list[OSError]) -> Iterator[Path]:
    """Yield the directories with a run.json, not those inside them. Add the errors of others to `unreadable`."""
    for path, names, files in os.walk(directory, onerror=unreadable.append):
        if "run.json" in files:
            yield Path(path)
        depth = len(Path(path).relative_to(directory).parts)
        names[:] = sorted(names) if "run.json" not in files and depth < MAX_DEPTH else []


def run_row(path: Path) -> RunRow:
    """Return the row of the run in a directory; one that cannot be read says why."""
    try:
        return _row(path)
    except (HybridFlowError, OSError) as error:
        return RunRow(path, problem=str(error))


def _row(path: Path) -> RunRow:
    running = is_running(path)  # first: the last row of a run that ends meanwhile is read below
    starts = known_starts(path)
    start, metrics = starts[-1], path / METRICS
    rows = read_last_rows(metrics, LAST_ROWS) if os.path.lexists(metrics) else []
    step = rows[-1].get("step") if rows else 0
    if not isinstance(step, int):
        raise DataError(f"{metrics}: the last row has no integer step; remove the line or the file.")
    figure, val_figure = next((pair for pair in FIGURES.items() if any({*pair} & row.keys() for row in rows)), ("", ""))
    val_rows = read_last_rows(metrics, 1, f'"{val_figure}"') if val_figure else []
    total_steps = start.get("total_steps", 0)
    checkpoints = _checkpoint_bytes(path / "checkpoints")
    checkpoint_step = max(checkpoints, default=0)
    recipes = [found for each in reversed(starts) if (found := _recipe(each))]
    recipe = next((each for each in recipes if each != OWN_RECIPE), recipes[0] if recipes else "")
    return RunRow(
        path,
        kind=start.get("kind", ""),
        recipe=recipe,
        step=step,
        total_steps=total_steps,
        figure=figure,
        value=_last(rows, figure),
        val_figure=val_figure,
        val_value=_last(val_rows, val_figure),
        state=_state(running, step, total_steps, checkpoint_step),
        checkpoint_step=checkpoint_step,
        checkpoint_bytes=sum(checkpoints.values()),
        started=_seconds(starts[0].get("started_at")),
        written=os.lstat(metrics if rows else path / "run.json").st_mtime,
    )


def _state(is_running: bool, step: int, total_steps: int, checkpoint_step: int) -> State:
    """Return "running" if a process holds the lock, "failed" if it ended without a checkpoint of its last step."""
    if is_running:
        return "running"
    if 0 < total_steps <= step:
        return "finished"
    return "failed" if step > checkpoint_step or not step else "stopped"


def _last(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return float(values[-1]) if values else None


def _recipe(start: Mapping[str, Any]) -> str:
    """Return the names of a start's recipes; "" if they are not known."""
    if "recipe" in start:  # of a Python program
        return start["recipe"]
    kind, *arguments = start.get("command", [])[1:] or [""]
    if kind not in KINDS:
        return ""
    given = [each for each in arguments if "=" not in each and (each.endswith(".toml") or packaged_recipe(each))]
    return " ".join(Path(each).name for each in given) or NO_RECIPE


def _seconds(text: Any) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0


def _checkpoint_bytes(directory: Path) -> dict[int, int]:
    """Return the bytes of each checkpoint by step. `directory` may be a link: nothing is written."""
    if not directory.is_dir():
        return {}
    steps = [match for match in map(re.compile(r"step_(\d{6,18})").fullmatch, os.listdir(directory)) if match]
    return {
        int(step[1]): sum(_size(Path(path, name)) for path, _, names in os.walk(directory / step[0]) for name in names)
        for step in steps
        if not (directory / step[0]).is_symlink()
    }


def _size(file: Path) -> int:
    try:
        status = os.lstat(file)
    except FileNotFoundError:  # an old checkpoint that the run removes now
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def age(seconds: float, now: float | None = None) -> str:
    """Return how long ago a time of `time.time()` was, in its largest unit, as in "3 h"; "-" for 0."""
    if not seconds:
        return "-"
    past = max(0.0, (time.time() if now is None else now) - seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if past >= length:
            return f"{past // length:.0f} {unit}"
    return f"{past:.0f} s"
