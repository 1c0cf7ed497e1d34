"""`PackedBatch`: a batch as one object in an object store.

An index lists the columns. The bytes of each column are a separate buffer, which pickle (protocol 5) carries out of
band. Packing does not copy contiguous columns. `read` copies the requested columns and rows into a new batch and
touches no others, so that the rest of an object mapped into this process costs nothing.
"""

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict

from hybridflow.errors import BatchError
from hybridflow.protocol.batch import Batch, count_rows, require_names, tensors_of
from hybridflow.protocol.meta_info import copy_structure
from hybridflow.protocol.rows import RowIndex, count_rows_of

COMPRESS_FROM_BYTES = 4096
"""Columns below this size are not compressed: the call costs more than it saves."""


@dataclass(frozen=True, slots=True)
class PackedColumn:
    """One column. `raw` holds its bytes, compressed if `is_compressed`; for objects, their pickle or the array."""

    kind: Literal["tensor", "array", "objects"]
    dtype: Any
    shape: tuple[int, ...]
    raw: Any
    is_compressed: bool = False

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, compress: bool = False) -> "PackedColumn":
        """Return the column of a tensor of any dimension: detached, on the CPU, without a copy if possible."""
        if tensor.is_quantized:
            raise BatchError("a quantized tensor cannot be packed: its bytes lack the scale; send tensor.dequantize().")
        if not _has_plain_bytes(tensor):
            flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            if flat.numel() == 1:
                flat = flat.clone(memory_format=torch.contiguous_format)  # an expanded tensor still has stride 0
            raw = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
        else:
            raw = tensor.view(torch.uint8).numpy().reshape(-1)
        return _packed("tensor", tensor.dtype, tuple(tensor.shape), raw, compress)

    @classmethod
    def of_array(
        cls, name: str, array: np.ndarray, dumps: Callable[[Any], bytes] | None = None, compress: bool = False
    ) -> "PackedColumn":
        """Return the column of a numpy array; `dumps` as in `PackedBatch.pack`, `name` for its error message."""
        if array.dtype.hasobject:
            raw = array if dumps is None else _dumped(name, array, dumps)
            return cls("objects", array.dtype, array.shape, raw)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
        return _packed("array", array.dtype, array.shape, raw, compress)

    @property
    def num_bytes(self) -> int:
        """Size of the packed bytes that are sent."""
        return len(self.raw) if self.kind == "objects" else memoryview(self.raw).nbytes

    def __reduce_ex__(self, protocol: Any) -> tuple:
        raw = self.raw
        if self.kind != "objects":
            raw = pickle.PickleBuffer(raw) if int(protocol) >= 5 else bytes(raw)
        return PackedColumn, (self.kind, self.dtype, self.shape, raw, self.is_compressed)

    def read(self, rows: RowIndex, shared: bool = False) -> torch.Tensor | np.ndarray:
        """Return a copy of the rows; `shared`: a view of contiguous rows in this memory, which must not be written."""
        if self.kind == "objects":
            objects = pickle.loads(self.raw) if isinstance(self.raw, bytes) else self.raw.copy()
            return objects if rows is None else objects[rows]
        stored = np.frombuffer(self._bytes(), dtype=np.uint8)
        if self.kind == "tensor":  # stays bytes, since numpy lacks some dtypes of torch
            stored = stored.reshape(*self.shape, self.dtype.itemsize)
        else:
            stored = stored.view(self.dtype).reshape(self.shape)
        if isinstance(rows, np.ndarray):
            own = stored[rows]
        else:
            own = stored if rows is None else stored[rows]
            own = _as_if_writable(own) if shared else np.array(own)
        if self.kind == "array":
            return own
        shape = self.shape if rows is None else (len(own), *self.shape[1:])
        if own.size == 0:
            return torch.empty(shape, dtype=self.dtype)
        return torch.frombuffer(own, dtype=self.dtype).reshape(shape)

    def _bytes(self) -> Any:
        if not self.is_compressed:
            return self.raw
        import pyarrow

        size = int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self._itemtype()).itemsize
        return pyarrow.decompress(self.raw, decompressed_size=size, codec="zstd")

    def _itemtype(self) -> Any:
        return f"V{self.dtype.itemsize}" if self.kind == "tensor" else self.dtype


class PackedBatch:
    """The packed columns of a batch; `len` is the number of rows. Built by `PackedBatch.pack`, or by unpickling."""

    __slots__ = ("_auto_padding", "_cls", "_has_device", "_has_tensors", "_meta_info", "columns", "num_rows")

    def __init__(
        self,
        cls: type[Batch],
        num_rows: int,
        columns: Mapping[str, PackedColumn],
        meta_info: Any,
        has_tensors: bool,
        has_device: bool,
        auto_padding: bool,
    ) -> None:
        self._cls, self.num_rows, self.columns, self._meta_info = cls, num_rows, columns, meta_info
        self._has_tensors, self._has_device, self._auto_padding = has_tensors, has_device, auto_padding

    @classmethod
    def pack(
        cls,
        data: Batch,
        dumps: Callable[[Any], bytes] | None = None,
        compress: bool = False,
    ) -> "PackedBatch":
        """Return the packed batch, sharing its memory. Tensors are detached and moved to the CPU.

        `dumps` pickles each object column and meta_info separately, so that reading other columns does not load
        them; without it they are pickled together with the PackedBatch. `compress` uses zstd. Raises BatchError for
        objects that cannot be pickled.
        """
        rows = count_rows(data.batch, data.non_tensor_batch, data.meta_info)
        columns = {name: PackedColumn.of_tensor(tensor, compress) for name, tensor in tensors_of(data.batch).items()}
        for name, array in data.non_tensor_batch.items():
            columns[name] = PackedColumn.of_array(name, array, dumps, compress)
        meta_info: Any = data.meta_info
        if dumps is not None:
            meta_info = _dumped("meta_info", meta_info, dumps) if meta_info else None
        has_device = data.batch is not None and data.batch.device is not None
        return cls(type(data), rows or 0, columns, meta_info, data.batch is not None, has_device, data.auto_padding)

    def read(self, columns: Iterable[str] | None = None, rows: RowIndex = None, shared: bool = False) -> Any:
        """Return a new batch of the named columns and rows (None: all), with meta_info. Raises FieldError.

        `shared`: its memory may be that of the store, which must not be written; for a caller that copies it.
        """
        names = list(self.columns) if columns is None else list(columns)
        require_names(names, self.columns, "the batch")
        contents = {name: self.columns[name].read(rows, shared) for name in names}
        tensors = {name: column for name, column in contents.items() if self.columns[name].kind == "tensor"}
        arrays = {name: column for name, column in contents.items() if self.columns[name].kind != "tensor"}
        batch = None
        if self._has_tensors:
            num_rows = count_rows_of(rows, self.num_rows)
            batch = TensorDict(tensors, [num_rows], device="cpu" if self._has_device else None)
        meta_info = self._meta_info
        if isinstance(meta_info, dict):
            meta_info = copy_structure(meta_info)
        else:
            meta_info = {} if meta_info is None else pickle.loads(meta_info)
        return self._cls._unchecked(batch, arrays, meta_info, self._auto_padding)  # pyright: ignore[reportArgumentType]

    def num_bytes(self, columns: Iterable[str] | None = None) -> int:
        """Return the packed size in bytes of the named columns (None: all columns and meta_info)."""
        names = self.columns if columns is None else columns
        num_bytes = sum(self.columns[name].num_bytes for name in names)
        return num_bytes + (len(self._meta_info) if columns is None and isinstance(self._meta_info, bytes) else 0)

    def __len__(self) -> int:
        return self.num_rows

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return PackedBatch, (
            self._cls,
            self.num_rows,
            self.columns,
            self._meta_info,
            self._has_tensors,
            self._has_device,
            self._auto_padding,
        )

    def __repr__(self) -> str:
        return f"PackedBatch of {self.num_rows} rows: {', '.join(self.columns) or 'no columns'}"


def batch_bytes(value: Any) -> int:
    """Return the bytes of the tensors and numeric arrays of a batch or a list of batches; 0 for other values.

    Objects are not counted: their size is known only when they are pickled.
    """
    if isinstance(value, list | tuple):
        return sum(map(batch_bytes, value))
    if not hasattr(value, "non_tensor_batch"):
        return 0
    arrays = [array.nbytes for array in value.non_tensor_batch.values() if not array.dtype.hasobject]
    return sum(tensor.nbytes for tensor in tensors_of(value.batch).values()) + sum(arrays)


def _has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the memory of the tensor is its bytes in order, which is by far the most frequent case."""
    return (
        tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and tensor.ndim > 0
        and tensor.stride(-1) == 1
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


class _Memory:
    """The memory of an array without its read-only flag, since torch warns about every read-only view."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array  # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _as_if_writable(array: np.ndarray) -> np.ndarray:
    if array.flags.writeable or array.size == 0:
        return array
    return array.copy() if array.dtype.fields else np.asarray(_Memory(array))  # records would lose their alignment


def _packed(
    kind: Literal["tensor", "array"], dtype: Any, shape: tuple[int, ...], raw: np.ndarray, compress: bool
) -> PackedColumn:
    if compress and raw.nbytes >= COMPRESS_FROM_BYTES:
        import pyarrow

        small = pyarrow.compress(raw, codec="zstd")
        if small.size < raw.nbytes:
            return PackedColumn(kind, dtype, shape, small, True)
    return PackedColumn(kind, dtype, shape, raw)


def _dumped(name: str, value: Any, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(value)
    except Exception as error:  # pickling a user's object may raise any error
        raise BatchError(
            f"{name!r} cannot be sent to another process, {type(error).__name__}: {error}; keep plain data in a batch "
            "and build such an object inside the worker."
        ) from error
