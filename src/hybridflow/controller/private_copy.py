"""Private copies of arguments and results: in-place writes by a worker are not visible to the caller, or vice versa."""

import copy
import dataclasses
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from hybridflow.errors import DispatchError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.handle import HeldBatch


def private_copy(value: Any, what: str) -> Any:
    """Return a copy of `value` with its own memory; tensors are detached, and a view is copied without its base.

    Functions and classes are shared; the contents of a future are copied when they are read. `what` names the value in
    the DispatchError raised for an object that cannot be copied, such as a lock or an open file.
    """
    if isinstance(value, DataProto):
        batch = None if value.batch is None else value.batch.detach().clone()
        columns = {key: private_copy(column, f"{what}[{key!r}]") for key, column in value.non_tensor_batch.items()}
        meta_info = private_copy(value.meta_info, what)
        return dataclasses.replace(value, batch=batch, non_tensor_batch=columns, meta_info=meta_info)
    if isinstance(value, (torch.Tensor, TensorDictBase)):
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype == object:
        copied = np.empty(value.shape, dtype=object)
        for index, element in np.ndenumerate(value):
            copied[index] = private_copy(element, what)
        return copied
    if isinstance(value, DataProtoFuture):
        own = value.with_handles(lambda handle: _own_held(handle, what))
        own.meta_info = private_copy(value.meta_info, what)
        return own
    if type(value) is dict:
        return {key: private_copy(element, what) for key, element in value.items()}
    if type(value) is list:
        return [private_copy(element, what) for element in value]
    if type(value) is tuple:
        return tuple(private_copy(element, what) for element in value)
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise DispatchError(
            f"{what} is a {type(value).__name__}, which cannot be copied ({error}); pass data, and build the object "
            f"inside the worker."
        ) from error


def copy_of_objects(batch: DataProto) -> DataProto:
    """Return the batch with copied objects and meta_info; tensors and arrays of numbers are shared."""
    arrays = {
        name: private_copy(array, name) if array.dtype.hasobject else array
        for name, array in batch.non_tensor_batch.items()
    }
    return batch._unchecked(batch.batch, arrays, private_copy(batch.meta_info, "meta_info"), batch.auto_padding)


def _own_held(handle: Any, what: str) -> Any:
    """Return a handle whose contents belong to the reader; handles other than HeldBatch copy when they are read."""
    return HeldBatch(private_copy(handle.batch, what)) if isinstance(handle, HeldBatch) else handle
