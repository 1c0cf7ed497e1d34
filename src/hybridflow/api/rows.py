"""Data that a Python program holds, as the rows of the files that a run reads."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from hybridflow.data.prepare.prompt_file import as_messages, prompt_row, write_parquet
from hybridflow.data.prepare.table import is_empty, messages_of, value_of
from hybridflow.errors import DataConfigError, DataError

Data = Any
"""Files (a path, or a list of paths), or rows: a list of dicts, a `datasets.Dataset` (also streaming), a table of
pandas or pyarrow, or an iterable of dicts."""

Kind = Literal["prompts", "examples", "pairs"]
COLUMNS = {"examples": ("prompt", "response"), "pairs": ("prompt", "chosen", "rejected")}
DATA_SOURCE = "rows"
"""Data source of rows that name none; a reward function may ignore it."""


def files_of(data: Data) -> list[str] | None:
    """Return the paths if `data` names files, None if it is rows."""
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, list | tuple) and data and all(isinstance(each, str | Path) for each in data):
        return [str(each) for each in data]
    return None


def records_of(data: Data, name: str, limit: int, how_to_limit: str) -> list[dict[str, Any]]:
    """Return the rows of `data` as dicts; of data without a length, which may have no end, the first `limit`.

    Raises DataConfigError without a limit for these, and DataError for what is not a row.
    """
    if hasattr(data, "to_pylist"):  # pyarrow
        data = data.to_pylist()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        data = data.to_dict("records")
    elif isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataConfigError(
            f"{name} is a {type(data).__name__}; expected files, a list of dicts, a Dataset or a table of rows."
        )
    if not hasattr(data, "__len__"):
        if not limit:
            raise DataConfigError(f"{name} is a stream, which may have no end; set {how_to_limit}.")
        data = islice(data, limit)
    records = list(_dicts(data, name))
    if not records:
        raise DataError(f"{name} has no rows.")
    return records


def _dicts(data: Iterable[Any], name: str) -> Iterator[dict[str, Any]]:
    for i, record in enumerate(data):
        if not isinstance(record, Mapping):
            raise DataError(
                f"{name}: row {i} is a {type(record).__name__}; expected a dict of column names and values."
            )
        yield dict(record)


def rows_of(
    records: Sequence[dict[str, Any]], kind: Kind, name: str, split: str, prompt: str, answer: str
) -> list[Any]:
    """Return records as the rows of a file of this kind. Raises DataError for a missing, empty or wrong column."""
    if kind == "prompts":
        has_answers = any(record.get(answer) is not None for record in records)
        return [
            _prompt_row(record, f"{name}: row {i}", split, i, prompt, answer if has_answers else "")
            for i, record in enumerate(records)
        ]
    if kind == "examples" and "messages" in records[0]:
        return [
            {"messages": as_messages(_filled(record, "messages", f"{name}: row {i}"))}
            for i, record in enumerate(records)
        ]
    return [_example_row(record, COLUMNS[kind], f"{name}: row {i}", prompt) for i, record in enumerate(records)]


def _prompt_row(record: dict[str, Any], place: str, split: str, index: int, prompt: str, answer: str) -> dict[str, Any]:
    if {"data_source", "prompt", "reward_model"} <= record.keys():  # a row of a prompt file
        return record
    question = _filled(record, prompt, place)
    truth = _filled(record, answer, place) if answer else ""
    row = prompt_row(
        data_source=str(record.get("data_source", DATA_SOURCE)),
        prompt=messages_of(question, prompt, place),
        ground_truth=truth,
        split=split,
        index=index,
        ability="",
    )
    others = {name: value for name, value in record.items() if name not in (prompt, answer, "data_source")}
    return {**row, "extra_info": {"split": split, "index": index, **others}}


def _example_row(record: dict[str, Any], columns: Sequence[str], place: str, prompt: str) -> dict[str, Any]:
    messages = messages_of(_filled(record, prompt, place), prompt, place)
    texts = {name: _filled(record, name, place) for name in columns[1:]}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{place}: '{name}' must be a text, got {text!r:.100}.")
    return {"prompt": messages, **texts}


def _filled(record: Mapping[str, Any], column: str, place: str) -> Any:
    value = value_of(record, column, place)
    if is_empty(value):
        raise DataError(f"{place}: '{column}' is empty; give it a value, or leave the row out.")
    return value


def file_of(rows: Sequence[Mapping[str, Any]], directory: Path, split: str) -> Path:
    """Return the file of rows in a directory; its name has a digest of them, so that it never replaces other rows."""
    text = json.dumps(rows, sort_keys=True, default=repr)
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    return directory / f"{split}-{digest}.parquet"


def write_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the rows, unless the file is there already. Raises DataError for a column with several types."""
    if not file.exists():
        write_parquet(file, rows)
