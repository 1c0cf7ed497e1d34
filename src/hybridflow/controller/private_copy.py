"""The copy a worker, or a caller, gets of what crosses the border between them: writing in place on one side is
never seen on the other.
"""

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
    """`value` with its own memory: only the rows it shows, even where it is a view of more; tensors are detached.

    Functions and classes are shared; of a future, what is read is copied when it is read. `what` names the value in the
    DispatchError raised for something that cannot be copied, such as a lock or an open file.
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
            f"{what} is a {type(value).__name__}, which cannot be copied ({error}); pass data, and build such an "
            f"object inside the worker."
        ) from error


def copy_of_objects(batch: DataProto) -> DataProto:
    """Return the batch with its own objects and meta_info; tensors and arrays of numbers are shared."""
    arrays = {
        name: private_copy(array, name) if array.dtype.hasobject else array
        for name, array in batch.non_tensor_batch.items()
    }
    return batch._unchecked(batch.batch, arrays, private_copy(batch.meta_info, "meta_info"), batch.auto_padding)


def _own_held(handle: Any, what: str) -> Any:
    """Return a handle whose contents belong to the reader: other handles copy what is read of them."""
    return HeldBatch(private_copy(handle.batch, what)) if isinstance(handle, HeldBatch) else handle
