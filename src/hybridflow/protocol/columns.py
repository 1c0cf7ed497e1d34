"""Functions that build, pick, rename, join and convert the columns of a batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.batch import Batch, Batches, Column, Names, as_names, count_rows, require_names, tensors_of
from hybridflow.protocol.equality import is_equal

Picked = tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any]]


def tensor_columns(tensors: Mapping[str, torch.Tensor]) -> TensorDict | None:
    """Return tensors of shape (rows, ...) as a TensorDict, or None if there are none."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            kind = "0-dimensional tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise FieldError(f"tensors[{name!r}] is a {kind}; it must be a tensor of shape (rows, ...).")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    lengths = {shape[0] for shape in shapes.values()}
    if len(lengths) > 1:
        raise BatchError(f"all columns of a batch need the same number of rows, but it has {shapes}.")
    return TensorDict(dict(tensors), [lengths.pop()]) if tensors else None


def object_column(values: list | tuple) -> np.ndarray:
    """Return a 1-dimensional object array with one entry per row; lists of equal length do not become a second axis."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def pick(data: Batch, batch_keys: Names, array_keys: Names, meta_info_keys: Names, default_all: bool) -> Picked:
    """Return the named tensors, arrays and meta_info keys of a batch.

    None means all of that kind if `default_all`, otherwise none. Raises FieldError if a name is missing.
    """
    wanted = {"batch": batch_keys, "non_tensor_batch": array_keys, "meta_info": meta_info_keys}
    have = {"batch": tensors_of(data.batch), "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info}
    picked = []
    for where, present in have.items():
        keys = list(present) if wanted[where] is None and default_all else as_names(wanted[where])
        require_names(keys, present, where)
        picked.append({key: present[key] for key in keys})
    return tuple(picked)


def rename_columns(data: Batches, old_keys: Names, new_keys: Names) -> Batches:
    """Return the batch with renamed columns; see `DataProto.rename`."""
    data.check_consistency()
    old, new = as_names(old_keys), as_names(new_keys)
    tensors = tensors_of(data.batch)
    present = [*tensors, *data.non_tensor_batch]
    require_names(old, present, "rename: the batch")
    conflicting = sorted(set(present).difference(old).intersection(new))
    if conflicting:
        raise FieldError(
            f"rename {old_keys!r} to {new_keys!r}: the batch already has {conflicting}; choose other names, or drop "
            "those columns first."
        )
    if len(old) != len(new):
        raise FieldError(
            f"rename {old_keys!r} to {new_keys!r}: {len(old)} old names and {len(new)} different new names; "
            "give one new name per old name."
        )
    names = dict(zip(old, new, strict=True))
    batch = data.batch
    if batch is not None:
        columns = {names.get(name, name): column for name, column in tensors.items()}
        batch = TensorDict(columns, batch.batch_size, device=batch.device)
    arrays = {names.get(name, name): array for name, array in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, data.meta_info, data.auto_padding)


def union_columns(mine: Mapping[str, Column], theirs: Mapping[str, Column]) -> dict[str, Column]:
    """Return all columns of both. Raises FieldError for a column with different contents; NaN equals NaN."""
    joined = dict(mine)
    for name, column in theirs.items():
        if name in joined and not is_equal(joined[name], column):
            raise FieldError(
                f"union: both batches have {name!r} with different contents: {_difference(joined[name], column)}. "
                "Drop it from one of them (select, pop) or rename it."
            )
        joined.setdefault(name, column)
    return joined


def _difference(mine: Column, theirs: Column) -> str:
    kinds = [f"{column.dtype} {tuple(column.shape)}" for column in (mine, theirs)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} here, {kinds[1]} there"
    rows = [row for row in range(len(mine)) if not is_equal(mine[row], theirs[row])]
    return f"{kinds[0]} that differ in {len(rows)} of {len(mine)} rows, first in row {rows[0]}"


def batch_from_tensordict(cls: type[Batches], tensor_dict: TensorDictBase, meta_info: dict | None) -> Batches:
    """Return the batch of a TensorDict; see `DataProto.from_tensordict`."""
    if not isinstance(tensor_dict, TensorDictBase) or len(tensor_dict.batch_size) != 1:
        got = getattr(tensor_dict, "batch_size", type(tensor_dict).__name__)
        raise BatchError(f"from_tensordict needs a TensorDict with exactly one batch dimension, got {got}.")
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    found: dict[str, Any] = {}
    for name, value in tensor_dict.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, NonTensorStack):
            arrays[name] = _as_column(value.tolist())
        elif isinstance(value, NonTensorData):
            found[name] = value.data
        else:
            raise FieldError(f"from_tensordict: {name!r} is a nested {type(value).__name__}; flatten it first.")
    batch = TensorDict(tensors, tensor_dict.batch_size, device=tensor_dict.device)
    return cls(batch, arrays, {**found, **(meta_info or {})})


def batch_to_tensordict(data: Batch) -> TensorDict:
    """Return the TensorDict of a batch; see `DataProto.to_tensordict`."""
    num_rows = count_rows(data.batch, data.non_tensor_batch, data.meta_info)
    conflicting = [key for key in data.meta_info if key in data.non_tensor_batch or key in tensors_of(data.batch)]
    if conflicting:
        raise FieldError(f"to_tensordict: {conflicting} are both columns and keys of meta_info; rename one of the two.")
    device = None if data.batch is None else data.batch.device
    merged = TensorDict(tensors_of(data.batch), [num_rows or 0], device=device)
    for name, array in data.non_tensor_batch.items():
        merged[name] = NonTensorStack(*[NonTensorData(value) for value in array])
    for key, value in data.meta_info.items():
        merged[key] = NonTensorData(value, batch_size=[num_rows or 0])
    return merged


def _as_column(values: list) -> np.ndarray:
    """Return numpy scalars of one type as an array of that type, other values as an object column."""
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and isinstance(values[0], np.generic):
        return np.array(values)
    return object_column(values)
