"""UltraFeedback binarized and files in its format: pairs of a better and a worse answer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.data.parquet_rows import shorten
from hybridflow.data.prepare.prompt_file import Messages, PreparedFiles, preference_row
from hybridflow.data.prepare.records import is_empty, messages_of, value_of
from hybridflow.data.prepare.splits import prepare_splits
from hybridflow.errors import DataError


def prepare_ultrafeedback(
    train_file: str | Path,
    output_dir: str | Path,
    *,
    test_file: str | Path | None = None,
    test_size: int = 100,
    keep_equal_scores: bool = False,
    seed: int = 0,
) -> PreparedFiles:
    """Write `train.parquet` and `test.parquet` with the columns of `PreferenceDataset` from pairs of answers.

    The columns are `chosen` and `rejected`, each a list of chat messages that ends with the answer, or the text of the
    answer alone; `prompt`, a text or chat messages, if no messages come before an answer; and optionally
    `score_chosen` and `score_rejected`. Files are .jsonl, .json, .csv or .parquet. Without a `test_file`, `test_size`
    random pairs are the test set.

    Pairs without a prompt or an answer, with equal answers, with equal scores (unless `keep_equal_scores`), with
    answers to different prompts, repeated pairs, and training pairs whose prompt is in the test set are dropped and
    counted in `dropped`. Raises DataError, naming file and row, for a missing column or a malformed row, and
    DataConfigError for another suffix and for a `test_size` that leaves no training pair.
    """

    def make_row(record: Mapping[str, Any], place: str) -> dict[str, Any] | str:
        (asked, chosen), (asked_too, rejected) = (_answer_of(record, side, place) for side in ("chosen", "rejected"))
        scores = _score_of(record, "score_chosen", place), _score_of(record, "score_rejected", place)
        if not (asked and asked_too):
            prompt = value_of(record, "prompt", place)
            if is_empty(prompt):
                return "no prompt"
            messages = messages_of(prompt, "prompt", place)
            asked, asked_too = asked or messages, asked_too or messages
        if asked != asked_too:
            return "the prompts of the two answers differ"
        if is_empty(chosen) or is_empty(rejected):
            return "an answer is empty"
        if chosen.strip() == rejected.strip():
            return "the answers are equal"
        if scores[0] is not None and scores[0] == scores[1] and not keep_equal_scores:
            return "the scores are equal"
        return preference_row(asked, chosen, rejected)

    return prepare_splits(
        train_file,
        output_dir,
        make_row,
        columns=("prompt", "chosen", "rejected"),
        unique=("prompt", "chosen", "rejected"),
        test_file=test_file,
        test_size=test_size,
        seed=seed,
    )


def _answer_of(record: Mapping[str, Any], side: str, place: str) -> tuple[Messages, str]:
    """Return (the messages before the answer, the answer), both empty if there is none."""
    value = value_of(record, side, place)
    if value is None or value == [] or isinstance(value, str):
        return [], value or ""
    *prompt, answer = messages_of(value, side, place)
    if answer["role"] != "assistant":
        raise DataError(
            f"{place}: the last message of '{side}' has the role {answer['role']!r}; expected the answer of the "
            "'assistant'."
        )
    return prompt, answer["content"]


def _score_of(record: Mapping[str, Any], column: str, place: str) -> float | None:
    value = record.get(column)
    if is_empty(value):
        return None
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise DataError(f"{place}: '{column}' must be a number, got {shorten(value)}.")
