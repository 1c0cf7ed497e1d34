"""Data that a Python program holds, as the rows of the files that a run reads."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hybridflow.data.prepare.prompt_file import write_parquet
from hybridflow.errors import DataConfigError, DataError

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


def records_of(data: Data, name: str, limit: int, how_to_limit: str) -> list[tuple[str, dict[str, Any]]]:
    """Return rows as (place, dict); of data without a length, which may have no end, the first `limit`.

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


def is_columnar(data: Data) -> bool:
    """Return whether rows come from columns of one type: a table of pandas or pyarrow, or a Dataset."""
    return any(hasattr(data, name) for name in ("to_pylist", "columns", "column_names"))


def _dicts(data: Iterable[Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for i, record in enumerate(data):
        if not isinstance(record, Mapping):
            raise DataError(
                f"{name}: row {i} is a {type(record).__name__}; expected a dict of column names and values."
            )
        if wrong := [column for column in record if not isinstance(column, str)]:
            raise DataError(f"{name}: row {i} has the column {wrong[0]!r:.100}; the name of a column must be a text.")
        yield f"{name}: row {i}", dict(record)


def file_of(rows: Sequence[Mapping[str, Any]], directory: Path, split: str) -> Path:
    """Return the file of rows in a directory; its name has a digest of them, so that it never replaces other rows.

    Raises DataError for names of columns that are not texts, and for a value that holds itself.
    """
    try:
        text = json.dumps(rows, sort_keys=True, default=repr)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"the rows of {split} cannot be written: {error}; use texts as names of columns, and values that do not "
            "hold themselves."
        ) from error
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    return directory / f"{split}-{digest}.parquet"


def write_rows(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the rows into `data/` of a run, unless the file is there already.

    Raises DataConfigError if the path leads out of the run, and DataError for a column with several types.
    """
    for path in (file.parent, file):
        if path.is_symlink():
            raise DataConfigError(f"'{file}' cannot be written: '{path}' is a symbolic link; move it away.")
    if not file.exists():
        write_parquet(file, rows)
