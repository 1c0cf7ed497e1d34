"""Padding of rows to make a batch divisible: copies of its rows, marked by the glossary's `duplicate_value`."""

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridflow.errors import BatchError
from hybridflow.protocol.consistency import count_rows, tensors_of
from hybridflow.protocol.fields import FIELDS
from hybridflow.protocol.rows import as_count, take_rows

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto


class DataProtoConfig:
    """Settings for every batch of the process."""

    auto_padding: bool = False
    """Let dispatch pad every batch to equal parts, as `auto_padding=True` does for one batch."""


def pad_dataproto_to_divisor(data: "DataProto", size_divisor: int) -> "tuple[DataProto, int]":
    """Return a batch whose length is a multiple of `size_divisor`, and the number of appended rows.

    The appended rows are copies of the first ones, repeated as often as needed. Columns with a `duplicate_value` in
    the glossary hold that value there (`row_ids` is -1), so that no metric or update counts a copy. `data` is not
    changed.
    """
    size_divisor = as_count(size_divisor, "size_divisor", 1)
    pad_size = -len(data) % size_divisor
    return append_copies(data, np.arange(pad_size) % max(len(data), 1)), pad_size


def unpad_dataproto(data: "DataProto", pad_size: int) -> "DataProto":
    """Return the batch without its last `pad_size` rows (views)."""
    pad_size = as_count(pad_size, "pad_size", 0)
    if pad_size > len(data):
        raise BatchError(f"pad_size={pad_size} is invalid: the batch has only {len(data)} rows.")
    return data.slice(0, len(data) - pad_size)


def append_copies(data: "DataProto", rows: np.ndarray) -> "DataProto":
    """Return the batch followed by copies of `rows`; columns with a `duplicate_value` hold that value there."""
    count_rows(data.batch, data.non_tensor_batch, data.meta_info)
    batch = data.batch
    if batch is not None and len(rows):
        tensors = {name: _append(name, column, rows) for name, column in tensors_of(batch).items()}
        batch = TensorDict(tensors, [batch.batch_size[0] + len(rows)], device=batch.device)
    arrays = {name: _append(name, column, rows) for name, column in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, data.meta_info, data.auto_padding)


def mark_copies(data: "DataProto", column: str, copies: np.ndarray, value: Any) -> None:
    """Replace a column of this batch by a copy that holds `value` where `copies` is True."""
    columns: Any = data.non_tensor_batch if column in data.non_tensor_batch else data.batch
    own = copy.deepcopy(columns[column])
    own[np.flatnonzero(copies)] = value
    columns[column] = own


def _duplicate_value(name: str) -> Any:
    return FIELDS[name].duplicate_value if name in FIELDS else None


def _append(name: str, column: Any, rows: np.ndarray) -> Any:
    if not len(rows):
        return column
    copies: Any = take_rows(column, rows)
    if (value := _duplicate_value(name)) is not None:
        copies[...] = value
    return torch.cat([column, copies]) if isinstance(column, torch.Tensor) else np.concatenate([column, copies])
