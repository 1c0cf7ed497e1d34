"""Data that a Python program holds, as the rows of the files that a run reads."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridflow.data.parquet_rows import require_single_columns, table_rows
from hybridflow.data.prepare.prompt_file import write_parquet
from hybridflow.data.prepare.records import SUFFIXES
from hybridflow.data.values import plain_row
from hybridflow.errors import DataConfigError, DataError
from hybridflow.models.hub.names import FILES

Data = Any
"""Files (a path, or a list of paths), or rows: a list of dicts, a `datasets.Dataset` (also streaming), a table of
pandas or pyarrow, or an iterable of dicts."""


def files_of(data: Data) -> list[str] | None:
    """Return the paths if `data` names files, None if it is rows."""
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, list | tuple) and data and all(isinstance(each, str | Path) for each in data):
        return [str(each) for each in data]
    return None


def require_names_of_files(names: Sequence[str], argument: str) -> None:
    """Raise DataConfigError for a text that names no data file: perhaps it was meant as a row."""
    for name in names:
        if not (name.startswith(FILES) or name.endswith(SUFFIXES) or os.path.exists(name)):
            raise DataConfigError(
                f"{argument}: {name!r:.200} does not name a file ({', '.join(SUFFIXES)}, a folder, {FILES}...); a row "
                f"is a dict, as in {argument}=[{{'prompt': {name!r:.40}}}]."
            )


def records_of(data: Data, name: str, limit: int, how_to_limit: str) -> list[tuple[str, dict[str, Any]]]:
    """Return rows as (place, dict); of data without a length, which may have no end, the first `limit`.

    Raises DataConfigError without a limit for these, and DataError for what is not a row.
    """
    if isinstance(data, Mapping) or not isinstance(data, Iterable | pa.Table | pa.RecordBatch):
        raise DataConfigError(
            f"{name} is a {type(data).__name__}; expected files, a list of dicts, a Dataset or a table of rows."
        )
    if not hasattr(data, "__len__") and not limit:
        raise DataConfigError(f"{name} is a stream, which may have no end; set {how_to_limit}.")
    rows = _rows(data, name)
    records = list(rows if hasattr(data, "__len__") else islice(rows, limit))
    if not records:
        raise DataError(f"{name} has no rows.")
    return records


def _rows(data: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a table, a Dataset or an iterable of dicts, with plain values."""
    if hasattr(data, "with_format") and getattr(data, "format", {}).get("type") != "custom":  # a Dataset's, or a stream
        data = data.with_format("arrow")[:] if hasattr(data, "__len__") else data.with_format(None)
    if isinstance(data, pa.Table | pa.RecordBatch):
        batches = data.to_batches() if isinstance(data, pa.Table) else [data]
        require_single_columns(data.schema.names, name)
        yield from table_rows(batches, name, data.schema.names)
        return
    is_table = any(hasattr(data, attribute) for attribute in ("columns", "column_names"))  # rows have each other's keys
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        require_single_columns(data.columns, name)
        data = data.to_dict("records")
    for i, record in enumerate(data):
        if not isinstance(record, Mapping):
            raise DataError(
                f"{name}: row {i} is a {type(record).__name__}; expected a dict of column names and values."
            )
        yield f"{name}: row {i}", plain_row(record, f"{name}: row {i}", keep_nulls=not is_table)


def file_of(rows: Sequence[Mapping[str, Any]], directory: Path, split: str) -> Path:
    """Return the file of rows of plain values; its name has a digest of them, so that it never replaces other rows."""
    text = json.dumps(rows, sort_keys=True, default=repr)
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return directory / f"{split}-{digest}.parquet"


def write_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the rows into `data/` of a run, unless the file is there already.

    Raises DataConfigError if the path leads out of the run, and DataError for a value that is not plain.
    """
    for path in (file.parent, file):
        if path.is_symlink():
            raise DataConfigError(f"'{file}' cannot be written: '{path}' is a symbolic link; move it away.")
    if not file.exists():
        write_parquet(file, rows)
