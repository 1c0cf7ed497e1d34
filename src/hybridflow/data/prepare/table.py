"""Any table of prompts and answers: the columns are named by the caller, all others become `extra_info`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.data.prepare.prompt_file import PreparedFiles
from hybridflow.data.prepare.records import is_empty, messages_of, value_of
from hybridflow.data.prepare.splits import prepare_splits, unsplit_row


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
    used = {column.partition(".")[0] for column in (prompt, answer)}

    def make_row(record: Mapping[str, Any], place: str) -> dict[str, Any] | str:
        question, truth = value_of(record, prompt, place), value_of(record, answer, place)
        if is_empty(question) or is_empty(truth):
            return "no prompt" if is_empty(question) else "no answer"
        messages = messages_of(question, prompt, place, instruction, system)
        others = {name: value for name, value in record.items() if name not in used}
        return unsplit_row(data_source, messages, truth, ability="", extra_info=others)

    return prepare_splits(
        train_file,
        output_dir,
        make_row,
        columns=(prompt, answer),
        test_file=test_file,
        test_size=test_size,
        seed=seed,
    )
