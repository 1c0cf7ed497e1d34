"""Functions that build, pick and rename the columns of a batch."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.consistency import Names, as_names, require_names, tensors_of

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto

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


def pick(data: "DataProto", batch_keys: Names, array_keys: Names, meta_info_keys: Names, default_all: bool) -> Picked:
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


def rename_columns(data: "DataProto", old_keys: Names, new_keys: Names) -> "DataProto":
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
