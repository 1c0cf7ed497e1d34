"""Rows of parquet files with their places, for errors that name file, row and column."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.files import require_regular_file

WRITERS = {
    "response": "write_sft_file",
    "messages": "write_conversation_file",
    "chosen": "write_preference_file",
    "prompt": "write_prompt_file",
}
"""Required column -> function of hybridflow.data that writes a file with it; the first match counts."""

_UNREADABLE = (pa.ArrowException, OSError, MemoryError)
"""What pyarrow raises for a file that is damaged, encrypted, of another format or unreadable."""

# Columns in which data sets keep images, audio and video, which are not supported in prompts.
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")


@dataclass(frozen=True)
class Row:
    """One row of a file; `place` is "FILE: row N", with N counted from 0."""

    place: str
    values: dict[str, Any]

    def text(self, column: str) -> str:
        """Return the value of a text column; raise DataError if it is not a text."""
        value = self.values[column]
        if not isinstance(value, str):
            raise DataError(f"{self.place}: column '{column}' must be a text, got {shorten(value)}.")
        return value

    def number(self, column: str) -> float:
        """Return the finite number in a column, or under that name in the column `extra_info`."""
        value = self.values.get(column)
        extra_info = self.values.get("extra_info")
        if value is None and isinstance(extra_info, dict):
            value = extra_info.get(column)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise DataError(
                f"{self.place}: data.order_by={column!r} has the value {shorten(value)}; expected a finite number in "
                "each row, in a column of that name or in extra_info."
            )
        return float(value)


def read_rows(
    files: str | Path | Sequence[str | Path], required: Sequence[str], optional: Sequence[str] = (), max_rows: int = 0
) -> list[Row]:
    """Return the rows of parquet files, in order, with the required and optional columns; `max_rows` 0: all of them.

    An optional column that a file lacks is None in its rows. Raises DataError for no files, for a missing, unreadable
    or empty file, for a missing column, and for images, audio or video.
    """
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    if not paths:
        raise DataConfigError("no data files were given; name at least one parquet file.")
    rows: list[Row] = []
    for path in paths:
        table = read_table(path, required, (*optional, *MEDIA_COLUMNS))
        if table.num_rows == 0:
            raise DataError(f"{path}: the file has no rows.")
        for name in MEDIA_COLUMNS:
            for number, value in enumerate(table[name] if name in table.column_names else ()):
                reject_media(f"{path}: row {number}", {name: value.as_py()})
        present = [name for name in (*required, *optional) if name in table.column_names]
        missing = {name: None for name in optional if name not in present}
        if max_rows:
            table = table.slice(0, max_rows - len(rows))
        for number, values in enumerate(python_rows(path, table.select(present), required)):
            rows.append(Row(f"{path}: row {number}", {**missing, **values}))
        if max_rows and len(rows) == max_rows:
            break
    return rows


def columns_of(files: str | Path | Sequence[str | Path]) -> list[str]:
    """Return the columns of the first file; none if it cannot be read, for which `read_rows` raises the error."""
    first = Path(files) if isinstance(files, str | Path) else next(map(Path, files), None)
    if first is None:
        return []
    try:
        require_data_file(first)
        return pq.read_schema(first).names
    except (DataError, *_UNREADABLE):
        return []


def read_table(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """Return the required columns of a parquet file, and those of the optional ones that it has.

    Raises DataError if the file cannot be read or lacks a required column.
    """
    require_data_file(path)
    _require_parquet(path, required)
    try:
        names = pq.read_schema(path).names
        _require_columns(path, names, required)
        wanted = [name for name in dict.fromkeys((*required, *optional)) if name in names]
        table = pq.read_table(path, columns=wanted)
    except _UNREADABLE as error:
        raise DataError(f"{path}: not a readable parquet file ({shorten_text(str(error))}).") from error
    return table


def python_rows(path: Path, table: pa.Table, required: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a file's table as Python values.

    Raises DataError for a null in a required column, before rows are converted, and for a value that Python lacks.
    """
    for name in required:
        if table[name].null_count:
            row = pc.index(table[name].is_null(), True).as_py()
            raise DataError(f"{path}: row {row}: column '{name}' has no value (null); give each row one.")
    try:
        return table.to_pylist()
    except (ValueError, OverflowError, *_UNREADABLE) as error:  # such as a text that is not UTF-8
        raise DataError(
            f"{path}: a value cannot be read ({type(error).__name__}: {shorten_text(str(error))})."
        ) from error


def require_data_file(path: Path) -> None:
    """Raise DataConfigError unless the path is a file with contents: not a folder, a pipe or a device."""
    try:
        require_regular_file(path)
        is_there = path.exists()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        problem = error.strerror if isinstance(error, OSError) else error
        raise DataConfigError(f"{shorten_text(str(path))!r}: cannot be opened: {problem}.") from None
    if not is_there:
        raise DataConfigError(f"{path}: no such file.")


def _require_columns(path: Path, names: Sequence[str], required: Sequence[str]) -> None:
    missing = [name for name in required if name not in names]
    if missing:
        found = shorten_text(", ".join(names)) or "no columns"
        how = _how_to_prepare(path, names, required)
        raise DataError(f"{path}: column '{missing[0]}' is missing; the file has {found}. {how}".rstrip())
    double = [name for name in required if names.count(name) > 1]
    if double:
        raise DataError(f"{path}: there are {names.count(double[0])} columns named '{double[0]}'; remove all but one.")


def _require_parquet(path: Path, required: Sequence[str]) -> None:
    """Raise DataConfigError for a file of JSON lines, with its columns and the command that converts it."""
    if path.suffix not in (".jsonl", ".json"):
        return
    columns = _columns_of_json_lines(path)
    found = shorten_text(", ".join(columns))
    raise DataConfigError(
        f"{path}: is a {path.suffix} file{' with the columns ' + found if columns else ''}; expected a "
        f"parquet file with the columns {', '.join(required)}. {_how_to_prepare(path, columns, required)}"
    )


def _columns_of_json_lines(path: Path) -> list[str]:
    """Return the keys of the first line; none if it is not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return []
    return list(first) if isinstance(first, dict) else []


def _how_to_prepare(path: Path, columns: Sequence[str], required: Sequence[str]) -> str:
    """Return the command or function that makes a file with the required columns."""
    if "reward_model" in required and {"question", "answer"} <= set(columns):
        return (
            f"Run `hybridflow prepare gsm8k --train-file TRAIN{path.suffix} --test-file TEST{path.suffix}` and name "
            "the parquet files that it writes."
        )
    writer = next((function for column, function in WRITERS.items() if column in required), None)
    return f"Write the file with hybridflow.data.{writer} (docs/data.md)." if writer else ""


def shorten(value: Any, max_chars: int = 120) -> str:
    """Return the repr of a value, cut to `max_chars` characters."""
    text = repr(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def shorten_text(text: str, max_chars: int = 200) -> str:
    """Return a text as one line, cut to `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[:max_chars]}..."


def reject_media(place: str, record: Mapping[str, Any]) -> None:
    """Raise DataError if a row holds images, audio or video."""
    for name in MEDIA_COLUMNS:
        if record.get(name) not in (None, [], "", b"", {}):
            raise DataError(
                f"{place}: column '{name}' holds data, but prompts with images, audio or video are not supported yet; "
                "use text prompts and remove the column."
            )
