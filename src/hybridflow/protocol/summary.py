"""Printable summary of a batch."""

from typing import TYPE_CHECKING, Any

import numpy as np

from hybridflow.protocol.consistency import tensors_of

if TYPE_CHECKING:
    from hybridflow.protocol.data_proto import DataProto


def describe_batch(data: "DataProto") -> str:
    """Return one line per column or key under the headings batch, non_tensor_batch and meta_info."""
    lines = ["batch"]
    lines += [f"  {name}: {tuple(t.shape)} ({t.dtype}) {t.device}" for name, t in tensors_of(data.batch).items()]
    lines += ["non_tensor_batch"]
    lines += [f"  {name}: {_kind(array)}" for name, array in data.non_tensor_batch.items()]
    lines += ["meta_info"]
    lines += [f"  {key}: {_kind(value)}" for key, value in data.meta_info.items()]
    return "\n".join(lines)


def _kind(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({_kind(item) for item in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(_kind(item) for item in value)})"
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{_kind(key)}: {_kind(item)}]"
    return type(value).__name__
