"""Rows and files of all `prepare` commands: one schema for all prompt data sets.

Files are replaced atomically, so that a reader never sees an incomplete one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.data.arrow_columns import column_of
from hybridflow.data.values import plain_row
from hybridflow.errors import DataConfigError, DataError
from hybridflow.runtime.files import write_bytes_atomically

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SourceFile:
    """A file that a `prepare` function read: its number of rows, and of those that were left out, by reason."""

    path: Path
    num_read: int
    dropped: Mapping[str, int]

    @property
    def num_kept(self) -> int:
        """Number of rows that were written."""
        return self.num_read - sum(self.dropped.values())


@dataclass(frozen=True)
class PreparedFiles:
    """The output of a `prepare` function: two parquet files, their numbers of rows, and the first training row.

    `sources`: the files that were read, none if the rows were generated.
    """

    train_file: Path
    test_file: Path
    num_train: int
    num_test: int
    first_row: Mapping[str, Any]
    sources: tuple[SourceFile, ...] = ()

    @property
    def dropped(self) -> dict[str, int]:
        """Number of rows of all sources that were left out, by reason."""
        counts: Counter[str] = Counter()
        for source in self.sources:
            counts.update(source.dropped)
        return dict(counts)


def as_messages(prompt: str | Messages) -> list[dict[str, Any]]:
    """Return a prompt as chat messages; a plain text becomes one message of the user."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def prompt_row(
    *,
    data_source: str,
    prompt: str | Messages,
    ground_truth: Any,
    split: str,
    index: int,
    ability: str = "math",
    question: str = "",
    answer: str = "",
) -> dict[str, Any]:
    """Return one row of a prompt file.

    `data_source` chooses the reward function. `ground_truth`, an argument of that function, is a string, a number, or a
    dict or a list of such values.
    """
    return {
        "data_source": data_source,
        "prompt": as_messages(prompt),
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def preference_row(prompt: str | Messages, chosen: str, rejected: str) -> dict[str, Any]:
    """Return one row of a preference file."""
    return {"prompt": as_messages(prompt), "chosen": chosen, "rejected": rejected}


def write_prompt_file(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows made by `prompt_row` as parquet; raise DataError if there are none."""
    return write_parquet(path, rows)


def write_sft_file(path: str | Path, examples: Sequence[tuple[str | Messages, str]]) -> Path:
    """Write (prompt, response) examples as the parquet file that `SFTDataset` reads."""
    return write_parquet(path, [{"prompt": as_messages(prompt), "response": response} for prompt, response in examples])


def write_preference_file(path: str | Path, pairs: Sequence[tuple[str | Messages, str, str]]) -> Path:
    """Write (prompt, chosen response, rejected response) as the parquet file that `PreferenceDataset` reads."""
    return write_parquet(path, [preference_row(*pair) for pair in pairs])


def write_conversation_file(
    path: str | Path, conversations: Sequence[Messages], tools: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write conversations as a parquet file for `SFTDataset`; `tools`: JSON schemas of the tools of all of them.

    Raises DataError for a malformed message, call or tool.
    """
    from hybridflow.data.tool_messages import stored_conversation  # which reads what this module writes

    schemas = [dict(tool) for tool in tools]
    rows = [
        stored_conversation(as_messages(messages), schemas, f"conversations: row {number}")
        for number, messages in enumerate(conversations)
    ]
    return write_parquet(path, rows)


def write_splits(
    output_dir: str | Path,
    train: Sequence[Mapping[str, Any]],
    test: Sequence[Mapping[str, Any]],
    sources: Sequence[SourceFile] = (),
) -> PreparedFiles:
    """Write `train.parquet` and `test.parquet` into `output_dir`, which is created if it is missing."""
    output_dir = Path(output_dir)
    if not train or not test:
        raise DataError(f"{output_dir}: {len(train)} training and {len(test)} test rows; both files need at least one.")
    train_file, test_file = output_dir / "train.parquet", output_dir / "test.parquet"
    train_data, test_data = _parquet(train_file, train), _parquet(test_file, test)  # both are valid: now they replace
    return PreparedFiles(
        train_file=_write(train_file, train_data),
        test_file=_write(test_file, test_data),
        num_train=len(train),
        num_test=len(test),
        first_row=train[0],
        sources=tuple(sources),
    )


def write_parquet(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as parquet, a column of several types or of objects of several keys as JSON.

    Raises DataError if there are no rows, and for a value that is not plain.
    """
    path = Path(path)
    if not rows:
        raise DataError(f"{path}: there are no rows to write.")
    return _write(path, _parquet(path, rows))


def _parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as the bytes of a parquet file; raise DataError, naming row and column, if that is not possible."""
    plain = [plain_row(row, f"{path}: row {number}") for number, row in enumerate(rows)]
    names = list(dict.fromkeys(name for row in plain for name in row))
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({name: column_of([row.get(name) for row in plain]) for name in names}), buffer)
    return buffer.getvalue().to_pybytes()


def _write(path: Path, data: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, data)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataConfigError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}.") from error
    return path
