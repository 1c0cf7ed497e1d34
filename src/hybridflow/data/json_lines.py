"""Objects of a file of JSON lines with their places, line by line and with a bound for each line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.data.parquet_rows import require_data_file, shorten_text
from hybridflow.errors import DataError

MAX_LINE_BYTES = 16 * 2**20


def read_json_lines(file: Path, columns: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place ("FILE: line N", N from 1) and the object of each line that is not blank.

    Raises DataError for a file that cannot be read, and for a line that is too long, is not strict JSON in UTF-8, has a
    key twice, or is not an object; `columns` names the expected keys.
    """
    require_data_file(file)
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), start=1):
                place = f"{file}: line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(f"{place}: is longer than {MAX_LINE_BYTES:,} bytes; write one object on each line.")
                if line.strip():
                    yield place, _object_of(line, place, columns)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from error


def _object_of(line: bytes, place: str, columns: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start} is not UTF-8; save the file as UTF-8.") from error
    except RecursionError:
        raise DataError(f"{place}: is not JSON: values are nested too deeply.") from None
    except ValueError as error:
        raise DataError(f"{place}: is not JSON: {shorten_text(str(error))}.") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: is a {type(record).__name__}; expected an object with {columns}.")
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"key {shorten_text(key)!r} occurs twice")
        entries[key] = value
    return entries


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
