"""Rows of data files of all kinds, by their form; and a hash of rows."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hybridflow.data.parquet_rows import Row, shorten_text
from hybridflow.data.prepare.records import is_empty, read_records
from hybridflow.data.row_forms import COLUMNS, SYSTEM, Kind, RowForm, rows_of
from hybridflow.errors import DataConfigError, DataError

PLAIN = RowForm()

Files = str | Path | Sequence[str | Path]


def read_data_rows(files: Files, kind: Kind, form: RowForm = PLAIN, order_by: str = "", max_rows: int = 0) -> list[Row]:
    """Return the rows of .parquet, .jsonl, .json or .csv files, or of folders of `datasets`, in order.

    `max_rows` 0: all of them. If a row lacks the column `extra_info` or `order_by`, it is None. Raises DataError,
    naming file, row and column, for a malformed row.
    """
    optional = ("extra_info", order_by) if order_by else ("extra_info",)
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    if not paths:
        raise DataConfigError("no data files were given; name at least one file.")
    rows: list[Row] = []
    for path in paths:
        rows += _rows_of_file(path, kind, form, optional, max_rows and max_rows - len(rows))
        if max_rows and len(rows) == max_rows:
            break
    return rows


def _rows_of_file(path: Path, kind: Kind, form: RowForm, optional: Sequence[str], max_rows: int) -> list[Row]:
    named = [form.columns.get(name, name) for name in COLUMNS[kind][:1]]
    records = form.mapped(read_records(path, named, lambda present: form.choose(kind, optional, present)))
    found = list(islice(records, max_rows or None))
    if not found:
        raise DataError(f"{path}: the file has no rows.")
    _require_columns(*found[0], path, kind, form)
    rows = rows_of(found, kind, form, path.stem)
    for (_, record), row in zip(found, rows, strict=True):
        for name in optional:
            row.setdefault(name, record.get(name))
    return [Row(place, row) for (place, _), row in zip(found, rows, strict=True)]


def _require_columns(place: str, first: dict[str, Any], path: Path, kind: Kind, form: RowForm) -> None:
    """Raise DataError, with what to do, if the first record lacks columns that its kind needs."""
    missing = form.missing(kind, list(first))
    if not missing:
        return
    known = {*form.names(kind, first).values(), "tools", SYSTEM}
    others = [name for name, value in first.items() if name not in known and _may_be_read(value)]
    fix = f"Make {' and '.join(missing)} of the row's values with data.map."
    lists = [name for name in others if isinstance(first[name], list)]
    if kind == "examples" and lists:
        missing, others = ["messages"], lists
    if len(others) >= len(missing):
        pairs = ", ".join(f"{name} = '{shorten_text(other, 40)}'" for name, other in zip(missing, others, strict=False))
        fix = f"Name the columns in data.columns, as in {{{pairs}}}. Or m{fix[1:]}"
    if kind == "prompts" and {"question", "answer"} <= first.keys():
        fix += f" For files of GSM8K: `hybridflow prepare gsm8k --train-file TRAIN{path.suffix} --test-file TEST"
        fix += f"{path.suffix}`, which takes the number out of each answer."
    name = form.columns.get(missing[0], missing[0])
    raise DataError(f"{place}: '{name}' is missing; the row has {shorten_text(', '.join(first)) or 'no keys'}. {fix}")


def _may_be_read(value: Any) -> bool:
    """Return whether a value may be a prompt or an answer."""
    is_list = isinstance(value, list) and all(isinstance(each, dict) for each in value)
    return (isinstance(value, str) or is_list) and not is_empty(value)


def fingerprint(rows: Iterable[Any]) -> str:
    """Return 32 hexadecimal digits: a hash of rows of JSON-like values, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()
