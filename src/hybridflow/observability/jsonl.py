"""A file with one JSON object per line: `metrics.jsonl`, `samples.jsonl`. It survives a killed process and a resume.

JSON has no NaN and no infinity: such a number is written as null, and its name with the text of the number
under the key `non_finite`, as in `{"step": 3, "actor/loss": null, "non_finite": {"actor/loss": "nan"}}`.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime import write_text_atomically

NON_FINITE = "non_finite"


class JsonlWriter:
    """Appends rows, each handed to the operating system at once. It is also a `Tracker`.

    A last line that a killed process left torn is dropped on opening.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        _drop_torn_line(self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; numpy and torch scalars become numbers.

        Raises DataError for what JSON cannot hold, and for a row that cannot be written: the disk may be full.
        """
        self.write_all([row])

    def write_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows at once, as `write` does."""
        lines = "".join(map(to_json_line, rows))
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise DataError(f"{self.path}: text of {len(lines)} characters was not written: {error}.") from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.write({"step": step, **metrics})

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps: a run that resumes from the checkpoint of `step` writes them again.

        The file is replaced as a whole, so a crash leaves the old one or the new one. Raises DataError, with
        nothing changed, for a row without a step.
        """
        kept = []
        for i, line in enumerate(_lines(self.path), start=1):
            row_step = _parse(line, self.path, i).get("step")
            if not isinstance(row_step, int):
                raise DataError(f"{self.path}, line {i}: no step, so it is not known which run it belongs to.")
            if row_step <= step:
                kept.append(f"{line}\n")
        write_text_atomically(self.path, "".join(kept))

    def close(self) -> None:
        """Nothing is left to do: no file stays open between two rows."""


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a file, NaN and infinities restored; a torn last line is left out, also while it is being written.

    Raises DataError if there is no file, and naming the file and the line where one is no JSON object.
    """
    if not Path(path).is_file():
        raise DataConfigError(f"{path} is missing; a run writes it at its first step.")
    rows = []
    for i, line in enumerate(_lines(Path(path)), start=1):
        row = _parse(line, Path(path), i)
        rows.append(row | {name: float(text) for name, text in row.pop(NON_FINITE, {}).items()})
    return rows


def to_json_line(row: Mapping[str, Any]) -> str:
    """One row as a line of JSON, by the rules above."""
    values, non_finite = {}, {}
    try:
        for name, value in row.items():
            number = value.item() if hasattr(value, "item") else value  # of numpy or torch
            if isinstance(number, float) and not math.isfinite(number):
                non_finite[name], number = str(number), None
            values[name] = number
        return (
            json.dumps(values | ({NON_FINITE: non_finite} if non_finite else {}), ensure_ascii=False, allow_nan=False)
            + "\n"
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"a row of {', '.join(row)} is no JSON: {error}; give numbers, text, lists of them.") from error


def _lines(path: Path) -> list[str]:
    """The complete lines."""
    return path.read_bytes().decode("utf-8", errors="replace").split("\n")[:-1]


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {number}: no JSON ({error}); remove the line or the file.") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: {line[:80]!r} is no JSON object; remove the line or the file.")
    return row


def _drop_torn_line(path: Path) -> None:
    """Cut the file behind its last line end."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
