"""From files of any rows to `train.parquet` and `test.parquet`: each row is kept, or dropped for a reason."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.data.prepare.prompt_file import PreparedFiles, SourceFile, write_splits
from hybridflow.data.prepare.records import read_records
from hybridflow.errors import DataConfigError, DataError

MakeRow = Callable[[Mapping[str, Any], str], dict[str, Any] | str]
"""Return the row of a record at a place, or the reason to drop it. Raises DataError for a malformed record."""


@dataclass
class _Source:
    """The rows of a file that are kept so far, and the number of the others by reason."""

    file: Path
    num_read: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def write_splits_of(
    train_file: str | Path,
    output_dir: str | Path,
    make_row: MakeRow,
    *,
    columns: Sequence[str],
    unique: Sequence[str],
    test_file: str | Path | None,
    test_size: int,
    seed: int,
) -> PreparedFiles:
    """Write the rows that `make_row` makes of the files' records.

    Without a `test_file`, `test_size` random rows of the training file are the test set. A row with the same values in
    the columns `unique` as an earlier one of its file is dropped, and a training row whose prompt is in the test set;
    with `unique=()` both are kept. `columns` names what a file is expected to have, for errors. Raises DataError for a
    file without rows or of which no row is kept, and DataConfigError for a `test_size` that leaves no training row.
    """
    train = _read(Path(train_file), make_row, columns, unique)
    sources, train_rows = [train], train.rows
    if test_file is None:
        train_rows, test_rows = _random_split(train.rows, test_size, seed)
    else:
        sources.append(_read(Path(test_file), make_row, columns, unique))
        test_rows = sources[1].rows
    if unique:
        tested = {_key(row, ["prompt"]) for row in test_rows}
        kept = [row for row in train_rows if _key(row, ["prompt"]) not in tested]
        train.dropped["the prompt is in the test set"] += len(train_rows) - len(kept)
        if not kept:
            raise DataError(f"{train.file}: each prompt is also in the test set; use a test file with other prompts.")
        train_rows = kept
    counts = [SourceFile(source.file, source.num_read, dict(+source.dropped)) for source in sources]
    return write_splits(output_dir, _numbered(train_rows, "train"), _numbered(test_rows, "test"), counts)


def _read(file: Path, make_row: MakeRow, columns: Sequence[str], unique: Sequence[str]) -> _Source:
    source = _Source(file)
    answers: dict[str, Any] = {}
    for place, record in read_records(file, columns):
        source.num_read += 1
        row = make_row(record, place)
        if isinstance(row, dict) and unique:
            key, answer = _key(row, unique), row.get("reward_model")
            if key in answers:
                row = "repeats an earlier row" if answers[key] == answer else "an earlier prompt with another answer"
            else:
                answers[key] = answer
        if isinstance(row, str):
            source.dropped[row] += 1
        else:
            source.rows.append(row)
    if not source.num_read:
        raise DataError(f"{file}: the file has no rows.")
    if not source.rows:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in source.dropped.items())
        raise DataError(f"{file}: all rows were dropped ({reasons}).")
    return source


def _random_split(rows: list[Any], test_size: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Return (training rows, `test_size` random test rows), both in the order of `rows`."""
    if not 0 < test_size < len(rows):
        fix = f"use 1 to {len(rows) - 1} (--test-size), or a test file" if len(rows) > 1 else "use a test file"
        raise DataConfigError(f"test_size={test_size} is invalid for {len(rows)} rows; {fix}.")
    chosen = {*random.Random(seed).sample(range(len(rows)), test_size)}
    split: tuple[list[Any], list[Any]] = [], []
    for index, row in enumerate(rows):
        split[index in chosen].append(row)
    return split


def _key(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    return json.dumps([row[column] for column in columns], sort_keys=True)


def _numbered(rows: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """Return rows with their split and index, unless a row has its own."""
    return [
        {**row, "extra_info": {"split": split, "index": index, **row["extra_info"]}} for index, row in enumerate(rows)
    ]
