"""GSM8K from its original files, with `question` and `answer`, as .jsonl or .parquet."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridflow.data.json_lines import read_json_lines
from hybridflow.data.parquet_rows import python_rows, read_table, shorten, shorten_text
from hybridflow.data.prepare.prompt_file import PreparedFiles, prompt_row, write_splits
from hybridflow.errors import DataConfigError, DataError

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def prepare_gsm8k(
    train_file: str | Path, test_file: str | Path, output_dir: str | Path, *, instruction: str = GSM8K_INSTRUCTION
) -> PreparedFiles:
    """Write `train.parquet` and `test.parquet` from GSM8K's original files (.jsonl or .parquet).

    The instruction is appended to each question; the ground truth is the number after "####", without commas and $.
    Raises DataError, naming file and row, for a missing file or column and for an answer without a final number.
    """
    train = _prompt_rows(Path(train_file), "train", instruction)
    test = _prompt_rows(Path(test_file), "test", instruction)
    return write_splits(output_dir, train, test)


def _prompt_rows(file: Path, split: str, instruction: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for place, record in _read_records(file):
        question, answer = _text(record, "question", place), _text(record, "answer", place)
        rows.append(
            prompt_row(
                data_source="openai/gsm8k",
                prompt=f"{question} {instruction}" if instruction else question,
                ground_truth=_final_number(answer, place),
                split=split,
                index=len(rows),
                question=question,
                answer=answer,
            )
        )
    if not rows:
        raise DataError(f"{file}: the file has no rows.")
    return rows


def _read_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record)."""
    if file.suffix not in (".jsonl", ".parquet"):
        raise DataConfigError(f"{file}: the suffix {file.suffix!r} is invalid: expected a .jsonl or .parquet file.")
    if file.suffix == ".parquet":
        columns = ("question", "answer")
        for row, record in enumerate(python_rows(file, read_table(file, columns), columns)):
            yield f"{file}: row {row}", record
        return
    yield from read_json_lines(file, "question and answer")


def _text(record: dict[str, Any], name: str, place: str) -> str:
    if name not in record:
        found = shorten_text(", ".join(record))
        raise DataError(f"{place}: '{name}' is missing; found {found or 'no keys'}.")
    value = record[name]
    if not isinstance(value, str):
        raise DataError(f"{place}: '{name}' must be a text, got {shorten(value)}.")
    return value


def _final_number(answer: str, place: str) -> str:
    _, marker, tail = answer.rpartition("####")
    number = tail.strip().replace(",", "").replace("$", "")
    if not marker or not _NUMBER.fullmatch(number):
        raise DataError(f"{place}: the answer must end in '#### number', got {answer[-60:]!r}.")
    return number
