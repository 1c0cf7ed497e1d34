"""Files with one JSON object per line, such as `metrics.jsonl`, that survive a killed process and a resume.

JSON has no NaN and no infinity. Such a number is written as null, and the key `non_finite` maps its name to its text,
as in `{"step": 3, "actor/loss": null, "non_finite": {"actor/loss": "nan"}}`.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.files import write_text_atomically
from hybridflow.runtime.plain_files import open_plain_file, require_plain_file

NON_FINITE = "non_finite"
LAST_BYTES = 1 << 22
"""Bytes at the end of a file in which `read_last_rows` looks."""


class JsonlWriter:
    """A writer that appends rows, each passed to the operating system at once. It is also a `Tracker`.

    An incomplete last line, left by a killed process, is dropped on opening. Raises OSError if the file cannot be
    written or is not a regular file: through a symbolic link another file would be cut, a FIFO would block.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        require_plain_file(self.path)
        self.path.touch()
        _drop_torn_line(self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; numpy and torch scalars become numbers.

        Raises DataError for a value that JSON cannot represent, and if the write fails, for example on a full disk.
        """
        self.write_all([row])

    def write_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append several rows in one write; see `write`."""
        lines = "".join(map(to_json_line, rows))
        try:
            with open(self.path, "a", encoding="utf-8", errors="replace") as file:
                file.write(lines)
        except OSError as error:
            raise DataError(f"{self.path}: {len(lines)} characters could not be written: {error}.") from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step as one row; of a value that JSON cannot hold, the name of its type."""
        rest = {name: _held(value) for name, value in metrics.items() if name not in ("step", NON_FINITE)}
        self.write({"step": step, **rest})

    def truncate_after(self, step: int) -> set[int]:
        """Drop the rows of later steps, which a run resumed from the checkpoint of `step` writes again.

        Return the steps that have rows. The file is replaced atomically. Raises DataError, and changes nothing, for a
        row without a step.
        """
        kept, steps = [], set()
        for i, line in enumerate(_lines(self.path), start=1):
            row_step = _parse(line, self.path, f"line {i}").get("step")
            if not isinstance(row_step, int):
                raise DataError(f"{self.path}, line {i}: the row has no integer step; remove the line or the file.")
            if row_step <= step:
                kept.append(f"{line}\n")
                steps.add(row_step)
        write_text_atomically(self.path, "".join(kept))
        return steps

    def close(self) -> None:
        """Do nothing, since no file stays open between two rows."""


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return all rows of a file with NaN and infinities restored, without an incomplete last line.

    Raises DataError if the file is missing, and for a line that is not a JSON object, with its number.
    """
    if not Path(path).is_file():
        raise DataConfigError(f"{path} not found; a run writes it at its first step.")
    rows = []
    for i, line in enumerate(_lines(Path(path)), start=1):
        rows.append(_row(line, Path(path), f"line {i}"))
    return rows


def read_last_rows(path: str | Path, count: int, containing: str = "") -> list[dict[str, Any]]:
    """Return the last rows of a file, at most `count`, of those whose line contains a text, as `read_jsonl` does.

    At most the last LAST_BYTES are read. Raises OSError if the file cannot be read, DataError for a line that is not a
    JSON object, and if a file has no line end in its last LAST_BYTES.
    """
    with open_plain_file(path) as file:
        end = file.seek(0, os.SEEK_END)
        size = 1 << 16
        while True:
            begin = max(0, end - size)
            file.seek(begin)
            lines = file.read(end - begin).decode("utf-8", errors="replace").split("\n")[:-1]  # without a torn line
            if begin and not lines and size >= LAST_BYTES:
                raise DataError(f"{path}: the last {size} bytes have no line end; it is not a file of rows.")
            wanted = [(i, line) for i, line in enumerate(lines[bool(begin) :], start=bool(begin)) if containing in line]
            if begin == 0 or len(wanted) >= count or size >= LAST_BYTES:
                break
            size *= 4
    return [_row(line, Path(path), f"line {len(lines) - i} from the end") for i, line in wanted[-count:]]


def to_json_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON, with non-finite numbers as described above."""
    values, non_finite = {}, {}
    try:
        for name, value in row.items():
            number = value.item() if hasattr(value, "item") else value  # numpy or torch scalar
            if isinstance(number, float) and not math.isfinite(number):
                non_finite[name], number = str(number), None
            values[name] = number
        return (
            json.dumps(values | ({NON_FINITE: non_finite} if non_finite else {}), ensure_ascii=False, allow_nan=False)
            + "\n"
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the row of {', '.join(row)} cannot be written as JSON: {error}; use numbers, text and lists of them."
        ) from error


def _held(value: Any) -> Any:
    """Return a value that JSON can hold: the value itself, or the name of its type."""
    try:
        to_json_line({"value": value})
    except DataError:
        return f"<{type(value).__name__}>"
    return value


def _lines(path: Path) -> list[str]:
    """Return the complete lines of a file."""
    return path.read_bytes().decode("utf-8", errors="replace").split("\n")[:-1]


def _row(line: str, path: Path, place: str) -> dict[str, Any]:
    """Return the row of a line with NaN and infinities restored."""
    row = _parse(line, path, place)
    try:
        return row | {name: float(text) for name, text in row.pop(NON_FINITE, {}).items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}, {place}: '{NON_FINITE}' is damaged ({error}); remove the line or the file."
        ) from error


def _parse(line: str, path: Path, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, {place}: not valid JSON ({error}); remove the line or the file.") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, {place}: {line[:80]!r} is not a JSON object; remove the line or the file.")
    return row


def _drop_torn_line(path: Path) -> None:
    """Truncate the file after its last line end."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
