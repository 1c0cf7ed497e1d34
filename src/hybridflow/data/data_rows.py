"""Rows of data files: parquet files in our columns as they are, all others by their form; and a hash of rows."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hybridflow.data.parquet_rows import Row, columns_of, read_rows, reject_media, shorten_text
from hybridflow.data.prepare.records import read_records
from hybridflow.data.row_forms import Kind, Records, RowForm, rows_of
from hybridflow.data.tool_messages import without_nulls_of_columns
from hybridflow.errors import DataError

PLAIN = RowForm()
REQUIRED = {
    "prompts": ("prompt", "data_source", "reward_model"),
    "examples": ("prompt", "response"),
    "pairs": ("prompt", "chosen", "rejected"),
}
"""Columns of a parquet file that is read as it is."""

Files = str | Path | Sequence[str | Path]


def read_data_rows(files: Files, kind: Kind, form: RowForm = PLAIN, order_by: str = "", max_rows: int = 0) -> list[Row]:
    """Return the rows of .parquet, .jsonl, .json or .csv files, or of folders of `datasets`, in order.

    `max_rows` 0: all of them. If a row lacks the column `extra_info` or `order_by`, it is None. Raises DataError,
    naming file, row and column, for a malformed row.
    """
    optional = ("extra_info", order_by) if order_by else ("extra_info",)
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    if form.is_plain and all(_is_plain(path) for path in paths):
        required = REQUIRED[kind]
        if kind == "examples" and "messages" in columns_of(files):
            required, optional = ("messages",), (*optional, "tools")
        return read_rows(paths, required, optional, max_rows)
    rows: list[Row] = []
    for path in paths:
        rows += _rows_of_file(path, kind, form, optional, max_rows and max_rows - len(rows))
        if max_rows and len(rows) == max_rows:
            break
    return rows


def _is_plain(path: Path) -> bool:
    return path.suffix not in (".jsonl", ".json", ".csv") and not os.path.isdir(path)


def _rows_of_file(path: Path, kind: Kind, form: RowForm, optional: Sequence[str], max_rows: int) -> list[Row]:
    named = [form.columns.get(name, name) for name in REQUIRED[kind][:1]]
    records: Records = form.mapped(read_records(path, named))
    found = list(islice(records, max_rows or None))
    if not found:
        raise DataError(f"{path}: the file has no rows.")
    for place, record in found:
        reject_media(place, record)
    _require_prompts(*found[0], path, named[0], form.columns.get("messages", "messages"))
    if kind == "examples" and (path.suffix == ".parquet" or os.path.isdir(path)):
        found = without_nulls_of_columns(found)
    rows = rows_of(found, kind, form.columns, path.stem)
    missing = dict.fromkeys(optional)
    kept = [{name: record[name] for name in optional if name in record} for _, record in found]
    return [Row(place, {**missing, **more, **row}) for (place, _), more, row in zip(found, kept, rows, strict=True)]


def _require_prompts(place: str, first: dict[str, Any], path: Path, prompt: str, messages: str) -> None:
    """Raise DataError, with what to do, if the first record has neither prompts under this name nor conversations."""
    if prompt.partition(".")[0] in first or messages.partition(".")[0] in first:
        return
    example = shorten_text(next(iter(first), "question"), 40)
    fix = f"Name the columns in data.columns, as in {{prompt = '{example}'}}."
    if {"question", "answer"} <= first.keys():
        fix += f" For files of GSM8K: `hybridflow prepare gsm8k --train-file TRAIN{path.suffix} --test-file TEST"
        fix += f"{path.suffix}`, which takes the number out of each answer."
    raise DataError(f"{place}: '{prompt}' is missing; the row has {shorten_text(', '.join(first)) or 'no keys'}. {fix}")


def fingerprint(rows: Iterable[Any]) -> str:
    """Return 32 hexadecimal digits: a hash of rows of JSON-like values, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
