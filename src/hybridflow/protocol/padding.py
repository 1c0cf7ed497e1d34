"""Padding of rows to make a batch divisible: copies of its rows, marked by the glossary's `duplicate_value`."""

import copy
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridflow.protocol.batch import Batch, Batches, count_rows, tensors_of
from hybridflow.protocol.fields import FIELDS
from hybridflow.protocol.rows import take_rows


class DataProtoConfig:
    """Settings for every batch of the process."""

    auto_padding: bool = False
    """Let dispatch pad every batch to equal parts, as `auto_padding=True` does for one batch."""


def append_copies(data: Batches, rows: np.ndarray) -> Batches:
    """Return the batch followed by copies of `rows`; columns with a `duplicate_value` hold that value there."""
    count_rows(data.batch, data.non_tensor_batch, data.meta_info)
    batch = data.batch
    if batch is not None and len(rows):
        tensors = {name: _append(name, column, rows) for name, column in tensors_of(batch).items()}
        batch = TensorDict(tensors, [batch.batch_size[0] + len(rows)], device=batch.device)
    arrays = {name: _append(name, column, rows) for name, column in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, data.meta_info, data.auto_padding)


def mark_copies(data: Batch, column: str, copies: np.ndarray, value: Any) -> None:
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
