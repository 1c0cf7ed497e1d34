"""DAPO-Math-17k and files in its format, whose rows are prompts with a nested ground truth."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.data.parquet_rows import shorten
from hybridflow.data.prepare.prompt_file import PreparedFiles
from hybridflow.data.prepare.records import answer_of, is_empty, messages_of, text_of, value_of
from hybridflow.data.prepare.splits import prepare_splits, unsplit_row
from hybridflow.errors import DataError

_TRUTH = "reward_model.ground_truth"


def prepare_dapo(
    train_file: str | Path,
    output_dir: str | Path,
    *,
    test_file: str | Path | None = None,
    test_size: int = 100,
    seed: int = 0,
) -> PreparedFiles:
    """Write `train.parquet` and `test.parquet` from files in the format of DAPO-Math-17k.

    The columns are `prompt` (chat messages, or a text), `reward_model` with a `ground_truth`, `data_source`, and
    optionally `ability` and `extra_info`, whose `index` names the problem. Prompts are kept as they are: the public
    ones ask for a last line "Answer: ...". Files are .jsonl, .json, .csv or .parquet. Without a `test_file`,
    `test_size` random rows are the test set.

    A row without prompt or ground truth, one that repeats an earlier prompt (the public file has each about 100
    times), and a training row whose prompt is in the test set are dropped and counted in `dropped`. Raises DataError,
    naming file and row, for a missing column or a malformed row, and DataConfigError for another suffix and for a
    `test_size` that leaves no training row.
    """
    columns = ("prompt", "reward_model", "data_source")
    return prepare_splits(
        train_file, output_dir, _make_row, columns=columns, test_file=test_file, test_size=test_size, seed=seed
    )


def _make_row(record: Mapping[str, Any], place: str) -> dict[str, Any] | str:
    prompt, truth = value_of(record, "prompt", place), answer_of(record, _TRUTH, place)
    data_source = text_of(record, "data_source", place)
    if is_empty(prompt) or not truth:
        return "no prompt" if is_empty(prompt) else "no answer"
    if not data_source:
        raise DataError(f"{place}: 'data_source' is empty; it chooses the reward function, for example 'math_dapo'.")
    info = record.get("extra_info") or {}
    if not isinstance(info, dict):
        raise DataError(f"{place}: 'extra_info' must be an object, got {shorten(info)}.")
    ability = text_of(record, "ability", place) if "ability" in record else "math"
    own = {name: value for name, value in info.items() if name != "split"}
    return unsplit_row(data_source, messages_of(prompt, "prompt", place), truth, ability, own)
