"""Records of .jsonl, .json, .csv and .parquet files and of folders that `datasets` has saved; errors name their row."""

import codecs
import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridflow.data.chat_prompts import read_messages
from hybridflow.data.parquet_rows import (
    Row,
    parquet_rows,
    require_data_file,
    require_single_columns,
    shorten,
    shorten_text,
    table_rows,
)
from hybridflow.data.prepare.prompt_file import Messages, as_messages
from hybridflow.data.sharegpt import chat_messages
from hybridflow.data.values import plain_row
from hybridflow.errors import DataConfigError, DataError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of folders that `datasets` has saved: that of a data set, and of several splits."""

MAX_FIELD = 2**31 - 1
"""Characters of a field of a .csv file; the default of the csv module is 131,072."""


def is_empty(value: Any) -> bool:
    """Return whether a column of a row has no value, or only spaces."""
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def messages_of(value: Any, column: str, place: str, instruction: str = "", system: str = "") -> Messages:
    """Return a prompt, a text or a list of chat messages, as messages; raise DataError for another value."""
    if not isinstance(value, str | list):
        raise DataError(f"{place}: '{column}' must be a text or a list of chat messages, got {value!r:.100}.")
    if isinstance(value, str):
        messages: Messages = as_messages(value)
    else:
        messages = read_messages(Row(place, {column: chat_messages(value, place)}), column)
    if instruction:
        messages = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']} {instruction}"}]
    return [{"role": "system", "content": system}, *messages] if system else messages


def value_of(record: Mapping[str, Any], column: str, place: str) -> Any:
    """Return the value of a column, or of a nested one whose name has dots; raise DataError if there is none."""
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            found = shorten_text(", ".join(map(str, record)))
            raise DataError(f"{place}: '{column}' is missing; the row has {found or 'no keys'}.")
        value = value[name]
    return value


def text_of(record: Mapping[str, Any], column: str, place: str) -> str:
    """Return the text in a column, "" for null; raise DataError if the column is missing or holds another value."""
    value = value_of(record, column, place)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{place}: '{column}' must be a text, got {shorten(value)}.")
    return value


def answer_of(record: Mapping[str, Any], column: str, place: str) -> str:
    """Return the text or number in a column as a text without outer spaces, "" for null; raise DataError for others."""
    value = value_of(record, column, place)
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal | None):
        raise DataError(f"{place}: '{column}' must be a text or a number, got {shorten(value)}.")
    return "" if value is None else str(value).strip()


def read_records(
    file: Path, columns: Sequence[str], choose: Callable[[list[str]], Sequence[str]] = list
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a file of SUFFIXES or a folder of `datasets`; the values are plain, see `plain_row`.

    `columns` is what errors expect. `choose`: of the columns of a parquet file or a folder those that are read.
    """
    if os.path.isdir(file):  # False also for a name that is too long
        yield from _read_folder(file, choose)
        return
    require_data_file(file)
    if file.suffix == ".parquet":
        yield from parquet_rows(file, choose)
    elif file.suffix in _TEXT_FILES:
        for place, record in _TEXT_FILES[file.suffix](file, " and ".join(columns)):
            yield place, plain_row(record, place)
    else:
        raise DataConfigError(f"{file}: the suffix {file.suffix!r} is invalid: expected {', '.join(SUFFIXES)}.")


def _read_json_lines(file: Path, columns: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    place = f"{file}: line {number}"
                    record = _decoded(line, place)
                    if not isinstance(record, dict):
                        fix = "; a file of one list has the suffix .json" if isinstance(record, list) else ""
                        raise DataError(
                            f"{place}: is a {type(record).__name__}; expected an object with {columns}{fix}."
                        )
                    yield place, record
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from error


def _decoded(text: bytes, place: str) -> Any:
    try:
        return json.loads(_decode(text, place), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise DataError(f"{place}: is not JSON: values are nested too deeply.") from None
    except ValueError as error:
        raise DataError(f"{place}: is not JSON: {shorten_text(str(error))}.") from error


def _decode(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        where = f"byte {error.start}" if line == 1 else f"line {line}"
        raise DataError(f"{place}: {where} is not UTF-8; save the file as UTF-8.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"key {shorten_text(key)!r} occurs twice")
        entries[key] = value
    return entries


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _read_json(file: Path, columns: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a list, or of JSON lines."""
    try:
        data = file.read_bytes().removeprefix(codecs.BOM_UTF8).strip()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from error
    if not data:
        return
    first_line = data.partition(b"\n")[0].strip()
    if data[:1] == b"{" and first_line[-1:] == b"}":
        yield from _read_json_lines(file, columns)
        return
    records = _decoded(data, str(file))
    if not isinstance(records, list):
        raise DataError(
            f"{file}: holds a {type(records).__name__}; expected a list of objects, or an object on each line."
        )
    for row, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{file}: row {row}: is a {type(record).__name__}; expected an object.")
        yield f"{file}: row {row}", record


def _read_csv(file: Path, columns: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(MAX_FIELD)
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            rows = filter(None, csv.reader(lines, strict=True))  # without empty lines
            names = next(rows, [])
            _require_names(names, str(file))
            for row, fields in enumerate(rows):
                place = f"{file}: row {row}"
                if len(fields) != len(names):
                    raise DataError(f"{place}: has {len(fields)} fields; the first line has {len(names)}.")
                yield place, dict(zip(names, fields, strict=True))
    except UnicodeDecodeError:
        _decode(file.read_bytes(), str(file))
        raise
    except (csv.Error, OSError) as error:
        raise DataError(f"{file}: is not a CSV file: {shorten_text(str(error))}.") from error


def _require_names(names: Sequence[str], place: str) -> None:
    """Raise DataError for names that are not those of columns separated by commas."""
    require_single_columns(names, place)
    if len(names) == 1 and (sign := re.search(r"[;\t|]", names[0])):
        raise DataError(f"{place}: its fields are separated by {sign[0]!r}; save the file with commas between fields.")
    for name in names:
        if name != name.strip():
            raise DataError(f"{place}: the column {name!r:.100} has spaces around its name; remove them.")


_TEXT_FILES = {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv}


def _read_folder(folder: Path, choose: Callable[[list[str]], Sequence[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    _require_saved(folder)
    row = 0
    for file in _arrow_files(folder):
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
                require_single_columns(batches.schema.names, str(folder))
                columns = choose(batches.schema.names)
                for _, record in table_rows(batches, str(folder), columns):
                    yield f"{folder}: row {row}", record
                    row += 1
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: is not an Arrow file of {folder}: {shorten_text(str(error))}.") from error


def _require_saved(folder: Path) -> None:
    if (folder / STATE).is_file():
        return
    if (folder / SPLITS).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
        raise DataConfigError(
            f"{folder}: holds the splits {', '.join(splits) or 'of a data set'}; name one of them, as in "
            f"'{folder / (splits[0] if splits else 'train')}'."
        )
    files = sorted(path.name for path in folder.iterdir() if path.suffix in SUFFIXES)
    hint = f"name its files: {shorten_text(', '.join(files))}" if files else "name a file"
    raise DataConfigError(f"{folder}: is not a folder of `Dataset.save_to_disk`, which has {STATE}; {hint}.")


def _arrow_files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{folder / STATE}: is damaged: {shorten_text(str(error))}; save the data set again."
        ) from error
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise DataError(f"{folder / STATE}: names {wrong[0]!r:.100}, which is not a file of the folder.")
    return [folder / name for name in names]
