"""GSM8K from its original files, with the columns `question` and `answer`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.data.prepare.prompt_file import PreparedFiles
from hybridflow.data.prepare.records import is_empty, text_of
from hybridflow.data.prepare.splits import prepare_splits, unsplit_row
from hybridflow.errors import DataError

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def prepare_gsm8k(
    train_file: str | Path, test_file: str | Path, output_dir: str | Path, *, instruction: str = GSM8K_INSTRUCTION
) -> PreparedFiles:
    """Write `train.parquet` and `test.parquet` from GSM8K's original files (.jsonl, .json, .csv or .parquet).

    The instruction is appended to each question; the ground truth is the number after "####", without commas and $.
    A row without a question is dropped and counted; all others are kept, also repeated ones. Raises DataError, naming
    file and row, for a missing file or column and for an answer without a final number.
    """

    def make_row(record: Mapping[str, Any], place: str) -> dict[str, Any] | str:
        question, answer = text_of(record, "question", place), text_of(record, "answer", place)
        if is_empty(question):
            return "no prompt"
        prompt = f"{question} {instruction}" if instruction else question
        truth = _final_number(answer, place)
        return unsplit_row("openai/gsm8k", prompt, truth, extra_info={"answer": answer, "question": question})

    columns = ("question", "answer")
    return prepare_splits(train_file, output_dir, make_row, columns=columns, unique=(), test_file=test_file)


def _final_number(answer: str, place: str) -> str:
    _, marker, tail = answer.rpartition("####")
    number = tail.strip().replace(",", "").replace("$", "")
    if not marker or not _NUMBER.fullmatch(number):
        raise DataError(f"{place}: the answer must end in '#### number', got {answer[-60:]!r}.")
    return number
