"""Conversion of a batch to one TensorDict and back: object columns as NonTensorStack, meta_info as NonTensorData."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from hybridflow.errors import BatchError, FieldError
from hybridflow.protocol.columns import object_column
from hybridflow.protocol.consistency import count_rows, tensors_of

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto


def batch_from_tensordict(cls: "type[DataProto]", tensor_dict: TensorDictBase, meta_info: dict | None) -> "DataProto":
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


def batch_to_tensordict(data: "DataProto") -> TensorDict:
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
