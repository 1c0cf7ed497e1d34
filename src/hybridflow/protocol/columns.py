"""Columns by name: made from what a caller has, picked, renamed."""

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
    """Tensors of shape (rows, ...) as a TensorDict; None if there are none."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            kind = "tensor without dimensions" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise FieldError(f"tensors[{name!r}] is a {kind}; it must be a tensor of shape (rows, ...).")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    lengths = {shape[0] for shape in shapes.values()}
    if len(lengths) > 1:
        raise BatchError(f"all columns of a batch need the same number of rows, but it has {shapes}.")
    return TensorDict(dict(tensors), [lengths.pop()]) if tensors else None


def object_column(values: list | tuple) -> np.ndarray:
    """One entry a row, whatever the entries are (equally long lists do not become a second axis)."""
    column = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def pick(data: "DataProto", batch_keys: Names, array_keys: Names, meta_info_keys: Names, default_all: bool) -> Picked:
    """The named parts of a batch; None means all of that kind, or none of it. Raises FieldError if one is missing."""
    wanted = {"batch": batch_keys, "non_tensor_batch": array_keys, "meta_info": meta_info_keys}
    have = {"batch": tensors_of(data.batch), "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info}
    picked = []
    for where, present in have.items():
        keys = list(present) if wanted[where] is None and default_all else as_names(wanted[where])
        require_names(keys, present, where)
        picked.append({key: present[key] for key in keys})
    return tuple(picked)


def rename_columns(data: "DataProto", old_keys: Names, new_keys: Names) -> "DataProto":
    """See `DataProto.rename`."""
    data.check_consistency()
    old, new = as_names(old_keys), as_names(new_keys)
    tensors = tensors_of(data.batch)
    present = [*tensors, *data.non_tensor_batch]
    require_names(old, present, "rename: the batch")
    taken = sorted(set(present).difference(old).intersection(new))
    if len(old) != len(new) or taken:
        problem = f"{taken} is taken" if taken else f"{len(old)} old and {len(new)} different new names"
        raise FieldError(f"rename {old_keys!r} to {new_keys!r}: {problem}; columns never overwrite each other.")
    names = dict(zip(old, new, strict=True))
    batch = data.batch
    if batch is not None:
        columns = {names.get(name, name): column for name, column in tensors.items()}
        batch = TensorDict(columns, batch.batch_size, device=batch.device)
    arrays = {names.get(name, name): array for name, array in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, data.meta_info, data.auto_padding)
