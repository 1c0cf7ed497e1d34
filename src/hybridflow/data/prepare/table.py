"""Any table of questions and answers, as .jsonl, .json, .csv or .parquet: each row is kept, or dropped for a reason."""

import csv
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.data.chat_prompts import read_messages
from hybridflow.data.dataset_folder import read_folder
from hybridflow.data.json_lines import read_json_lines
from hybridflow.data.parquet_rows import Row, columns_of, python_rows, read_table, require_data_file, shorten_text
from hybridflow.data.prepare.prompt_file import Messages, PreparedFiles, as_messages, prompt_row, write_splits
from hybridflow.errors import DataConfigError, DataError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_JSON_BYTES = 2**30
"""Size of a .json file, which is read as a whole."""


def prepare_table(
    train_file: str | Path,
    output_dir: str | Path,
    *,
    data_source: str,
    test_file: str | Path | None = None,
    test_size: int = 100,
    prompt: str = "prompt",
    answer: str = "answer",
    instruction: str = "",
    system: str = "",
    seed: int = 0,
) -> PreparedFiles:
    """Write `train.parquet` and `test.parquet` from a file with a column for the prompt and one for the answer.

    `prompt` and `answer` name the columns; a name with dots goes into nested values (`reward_model.ground_truth`). A
    prompt is a text or a list of chat messages; `instruction` is appended to its last message after a space, `system`
    is put before it. All other columns become entries of `extra_info`. Without a `test_file`, `test_size` random rows
    of the training file are the test set.

    A row without prompt or answer, one that repeats an earlier prompt, and a training row whose prompt is in the test
    set are dropped and counted in `dropped`. Raises DataError, naming file and row, for a missing column or a malformed
    row, and DataConfigError for another suffix and for a `test_size` that leaves no training row.
    """
    dropped: Counter[str] = Counter()

    def rows_of(file: str | Path) -> list[dict[str, Any]]:
        return _rows_of(Path(file), (prompt, answer), data_source, (instruction, system), dropped)

    train = rows_of(train_file)
    if test_file is not None:
        test = rows_of(test_file)
        tested = {_key(row) for row in test}
        kept = [row for row in train if _key(row) not in tested]
        dropped["the prompt is in the test file"] += len(train) - len(kept)
    else:
        if not 0 < test_size < len(train):
            raise DataConfigError(
                f"test_size={test_size} is invalid for {len(train)} rows; use 1 to {len(train) - 1}, or a test file."
            )
        chosen = {*random.Random(seed).sample(range(len(train)), test_size)}
        test = [row for index, row in enumerate(train) if index in chosen]
        kept = [row for index, row in enumerate(train) if index not in chosen]
    files = write_splits(output_dir, _numbered(kept, "train"), _numbered(test, "test"))
    return replace(files, dropped={reason: count for reason, count in dropped.items() if count})


def _rows_of(
    file: Path, columns: tuple[str, str], data_source: str, texts: tuple[str, str], dropped: Counter[str]
) -> list[dict[str, Any]]:
    """Return the rows that are kept, and count the others by their reason."""
    rows: list[dict[str, Any]] = []
    answers: dict[str, Any] = {}
    for place, record in read_records(file, columns):
        question, answer = (value_of(record, column, place) for column in columns)
        if is_empty(question) or is_empty(answer):
            dropped["no prompt" if is_empty(question) else "no answer"] += 1
            continue
        messages = messages_of(question, columns[0], place, *texts)
        row = prompt_row(data_source=data_source, prompt=messages, ground_truth=answer, split="", index=0, ability="")
        used = {column.partition(".")[0] for column in columns}
        row["extra_info"] = {name: value for name, value in record.items() if name not in used}
        key = _key(row)
        if key in answers:
            again = "repeats an earlier row" if answers[key] == answer else "an earlier prompt with another answer"
            dropped[again] += 1
            continue
        answers[key] = answer
        rows.append(row)
    if not rows:
        raise DataError(f"{file}: no row has both a '{columns[0]}' and an '{columns[1]}'.")
    return rows


def is_empty(value: Any) -> bool:
    """Return whether a column of a row has no value, or only spaces."""
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps(row["prompt"], sort_keys=True)


def _numbered(rows: list[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    return [
        {**row, "extra_info": {"split": split, "index": index, **row["extra_info"]}} for index, row in enumerate(rows)
    ]


def messages_of(value: Any, column: str, place: str, instruction: str = "", system: str = "") -> Messages:
    """Return a prompt, a text or a list of chat messages, as messages; raise DataError for another value."""
    if not isinstance(value, str | list):
        raise DataError(f"{place}: '{column}' must be a text or a list of chat messages, got {value!r:.100}.")
    messages = as_messages(value) if isinstance(value, str) else read_messages(Row(place, {column: value}), column)
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


def read_records(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) of a file of SUFFIXES or a folder of `datasets`; `columns`: what is expected, for errors."""
    if file.is_dir():
        yield from read_folder(file)
        return
    require_data_file(file)
    match file.suffix:
        case ".jsonl":
            yield from read_json_lines(file, " and ".join(columns))
        case ".json":
            yield from _read_json(file)
        case ".csv":
            yield from _read_csv(file)
        case ".parquet":
            table = read_table(file, (), columns_of(file))
            for row, record in enumerate(python_rows(file, table, ())):
                yield f"{file}: row {row}", record
        case _:
            raise DataConfigError(f"{file}: the suffix {file.suffix!r} is invalid: expected {', '.join(SUFFIXES)}.")


def _read_json(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if file.stat().st_size > MAX_JSON_BYTES:
        raise DataError(
            f"{file}: has more than {MAX_JSON_BYTES:,} bytes; write one object on each line of a .jsonl file."
        )
    try:
        records = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also of UTF-8
        raise DataError(f"{file}: is not JSON: {shorten_text(str(error))}.") from error
    if not isinstance(records, list):
        raise DataError(f"{file}: holds a {type(records).__name__}; expected a list of objects, or a .jsonl file.")
    for row, record in enumerate(records):
        if not isinstance(record, dict):
            raise DataError(f"{file}: row {row}: is a {type(record).__name__}; expected an object.")
        yield f"{file}: row {row}", record


def _read_csv(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with open(file, newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row, record in enumerate(reader):
                place = f"{file}: row {row}"
                if None in record or None in record.values():
                    found, wanted = (
                        len([value for value in record.values() if value is not None]),
                        len(reader.fieldnames or ()),
                    )
                    raise DataError(
                        f"{place}: has {'more' if None in record else found} fields; the first line has {wanted}."
                    )
                yield place, record
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{file}: is not a CSV file in UTF-8: {shorten_text(str(error))}.") from error
