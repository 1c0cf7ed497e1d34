"""Rows of parquet files and tables of Arrow with their places, for errors that name file, row and column."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.data.arrow_columns import values_of
from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.files import require_regular_file

PARQUET_ROWS = 10_000
"""Rows of a parquet file that are Python objects at a time; public files have millions of them."""

_UNREADABLE = (pa.ArrowException, OSError, MemoryError)
"""What pyarrow raises for a file that is damaged, encrypted, of another format or unreadable."""

_UNREADABLE_VALUES = (ValueError, TypeError, KeyError, OverflowError, RecursionError, *_UNREADABLE)
"""What it raises for a value that Python lacks, such as a text that is not UTF-8."""

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


def table_rows(
    batches: Iterable[pa.RecordBatch], place: str, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of batches, with these columns; `place` names the file or the table.

    Raises DataError for a column that occurs twice and, with its row, for a value that Python lacks.
    """
    first = 0
    for batch in batches:
        batch = batch.select(list(columns))
        try:
            values = [values_of(column) for column in batch.columns]
        except _UNREADABLE_VALUES as error:
            raise DataError(
                f"{place}: row {first + _row_of_error(batch)}: a value cannot be read ({type(error).__name__}: "
                f"{shorten_text(str(error))})."
            ) from error
        for row in zip(*values, strict=True) if values else [()] * batch.num_rows:
            yield f"{place}: row {first}", dict(zip(batch.schema.names, row, strict=True))
            first += 1


def require_single_columns(names: Iterable[Any], place: str) -> None:
    """Raise DataError if two columns of a table have the same name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{place}: there are {count} columns named {name!r:.100}; remove all but one.")


def _row_of_error(batch: pa.RecordBatch) -> int:
    """Return the first row of a batch whose values cannot be read."""
    for row in range(batch.num_rows):
        try:
            for column in batch.slice(row, 1).columns:
                values_of(column)
        except _UNREADABLE_VALUES:
            return row
    return 0


def parquet_rows(path: Path, choose: Callable[[list[str]], Sequence[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a parquet file, with the columns that a function chooses of all.

    Raises DataError if the file cannot be read.
    """
    require_data_file(path)
    try:
        with pq.ParquetFile(path, arrow_extensions_enabled=True) as file:
            require_single_columns(file.schema_arrow.names, str(path))
            columns = choose(file.schema_arrow.names)
            yield from table_rows(file.iter_batches(PARQUET_ROWS, columns=columns), str(path), columns)
    except _UNREADABLE as error:
        raise DataError(f"{path}: not a readable parquet file ({shorten_text(str(error))}).") from error


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
