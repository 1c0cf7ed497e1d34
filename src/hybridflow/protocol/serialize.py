"""A batch as pickle sees it: small structure in the stream, every column's bytes once, out of band with protocol 5."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from hybridflow.protocol.consistency import count_rows, tensors_of

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto

PackedTensor = tuple[str, torch.dtype, tuple[int, ...], np.ndarray]


def reduce_batch(data: "DataProto") -> tuple:
    """What `__reduce_ex__` returns. A view ships its own rows only; tensors travel detached and arrive on the CPU."""
    count_rows(data.batch, data.non_tensor_batch, data.meta_info)
    packed = [_pack(name, tensor) for name, tensor in tensors_of(data.batch).items()]
    batch_rows = None if data.batch is None else data.batch.batch_size[0]
    has_device = data.batch is not None and data.batch.device is not None
    # An array that is not contiguous would be copied into the stream instead of going out of band.
    arrays = {
        name: array if array.dtype.hasobject else np.ascontiguousarray(array)
        for name, array in data.non_tensor_batch.items()
    }
    return _rebuild, (type(data), batch_rows, has_device, packed, arrays, data.meta_info, data.auto_padding)


def _pack(name: str, tensor: torch.Tensor) -> PackedTensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return name, tensor.dtype, tuple(tensor.shape), np.zeros(0, np.uint8)
    return name, tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy()


def _unpack(dtype: torch.dtype, shape: tuple[int, ...], raw: np.ndarray) -> torch.Tensor:
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(_writable(raw)).view(dtype).reshape(shape)


def _writable(array: np.ndarray) -> np.ndarray:
    """The array itself, or a private copy of one that lies in read-only memory."""
    return array if array.flags.writeable else array.copy()


def _rebuild(
    cls: "type[DataProto]",
    batch_rows: int | None,
    has_device: bool,
    packed: list[PackedTensor],
    arrays: dict[str, np.ndarray],
    meta_info: dict[str, Any],
    auto_padding: bool,
) -> "DataProto":
    batch = None
    if batch_rows is not None:
        tensors = {name: _unpack(dtype, shape, raw) for name, dtype, shape, raw in packed}
        batch = TensorDict(tensors, [batch_rows], device="cpu" if has_device else None)
    return cls(batch, {name: _writable(array) for name, array in arrays.items()}, meta_info, auto_padding)
