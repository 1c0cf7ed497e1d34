"""Folders that the library `datasets` has saved, read without it: Arrow files, named in state.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridflow.data.parquet_rows import shorten_text
from hybridflow.errors import DataConfigError, DataError

STATE, SPLITS = "state.json", "dataset_dict.json"
OTHERS = (".parquet", ".jsonl", ".json", ".csv")


def read_folder(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) of a folder that `Dataset.save_to_disk` wrote.

    Raises DataConfigError for another folder, which says what to name instead, and DataError for a damaged one.
    """
    _require_saved(folder)
    row = 0
    for file in _files(folder):
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    for record in batch.to_pylist():
                        yield f"{folder}: row {row}", record
                        row += 1
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: is not an Arrow file of {folder}: {shorten_text(str(error))}.") from error


def _require_saved(folder: Path) -> None:
    if (folder / STATE).is_file():
        return
    if (folder / SPLITS).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
        raise DataConfigError(
            f"{folder}: holds the splits {', '.join(splits) or 'of a data set'}; name one of them, as in "
            f"'{folder / (splits[0] if splits else 'train')}'."
        )
    files = sorted(path.name for path in folder.iterdir() if path.suffix in OTHERS)
    hint = f"name its files: {shorten_text(', '.join(files))}" if files else "name a file"
    raise DataConfigError(f"{folder}: is not a folder of `Dataset.save_to_disk`, which has {STATE}; {hint}.")


def _files(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{folder / STATE}: is damaged: {shorten_text(str(error))}; save the data set again."
        ) from error
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise DataError(f"{folder / STATE}: names {wrong[0]!r:.100}, which is not a file of the folder.")
    return [folder / name for name in names]
