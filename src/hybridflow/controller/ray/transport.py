"""Serialization of values that are sent between processes, and back into values that the receiver owns.

A batch is sent as one `PackedBatch`: its columns are copied once into the store, and once out of it by the rank that
needs them. A future is sent as its plan, with handles in place of contents. Other tensors and arrays are packed too.
"""

import importlib.machinery
import io
import pickle
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import ray.cloudpickle
import torch
from tensordict import TensorDictBase

from hybridflow.controller.backend import CallTerms
from hybridflow.controller.worker_side import described
from hybridflow.errors import BatchError, DispatchError, WorkerError
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.handle import Duration, Handle, HeldBatch
from hybridflow.protocol.packed_batch import PackedBatch, PackedColumn
from hybridflow.protocol.rows import RowIndex
from hybridflow.runtime.observe import TraceEvent

cloudpickle: Any = ray.cloudpickle


class _Pickler(cloudpickle.CloudPickler):
    """A pickler that detaches tensors inside objects, as all other tensors are."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor that requires gradients to its detached copy, other objects as cloudpickle does."""
        if isinstance(obj, torch.Tensor) and obj.requires_grad:
            return obj.detach().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """Return the pickled value, including functions and classes that other processes cannot import."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


class CallReply(NamedTuple):
    """The status that a call returns: its trace event, and its frozen value if that is small."""

    event: TraceEvent
    value: bytes | None = None


@lru_cache(1024)
def pack_header(role: str, method_name: str, terms: CallTerms) -> bytes:
    """Return the part of a message that is equal in most calls of a method, as bytes that both sides cache."""
    return pickle.dumps((role, method_name, terms), protocol=5)


@lru_cache(1024)
def open_header(header: bytes) -> tuple[str, str, CallTerms]:
    """Return the role, method name and terms of a packed header."""
    return pickle.loads(header)


SMALL_BYTES = 64 * 2**10
"""Largest size, in bytes, at which a message is sent as one byte string, which saves most of Ray's work per object."""


@dataclass(frozen=True)
class _Bytes:
    """A wrapper of a large `bytes` value, which distinguishes it from a frozen value."""

    value: bytes


def freeze(value: Any, num_bytes: int, is_plain: bool = True) -> Any:
    """Return a packed value in the form passed to Ray: small ones as bytes, others unchanged with out-of-band buffers.

    `is_plain`: whether every process can import its classes; otherwise classes and functions are pickled with it.
    """
    if num_bytes <= SMALL_BYTES:
        return (pickle.dumps if is_plain else cloudpickle.dumps)(value, protocol=5)
    return _Bytes(value) if type(value) is bytes else value


def thaw(value: Any) -> Any:
    """Return the packed value of a frozen one."""
    if type(value) is bytes:
        return pickle.loads(value)
    return value.value if isinstance(value, _Bytes) else value


@dataclass(frozen=True)
class Slot:
    """A placeholder for the object at this index among those that arrive with the message."""

    index: int


class StoredBatch:
    """The handle of a packed batch that has arrived in this process."""

    where, produced = "", ()
    others: Sequence[Handle] = ()

    def __init__(self, packed: Any) -> None:
        self.packed, self.duration = packed, Duration()

    def get(self) -> Any:
        """Return the unpacked value."""
        return unpack(self.packed, ())

    def read(self, columns: tuple[str, ...] | None, rows: RowIndex, *, shared: bool = False) -> DataProto:
        """Return the selected columns and rows. Raises BatchError if the value is not a batch."""
        if not isinstance(self.packed, PackedBatch):
            raise BatchError(f"the call returned a {type(self.packed).__name__}, which has no columns; use get().")
        return self.packed.read(columns, rows, shared)

    @staticmethod
    def wait_for(handles: Sequence[Handle]) -> None:
        """Return at once: the values arrived with the message."""

    def release(self) -> None:
        """Do nothing: the store releases the value with the message."""


@dataclass(frozen=True)
class _Pickled:
    """A pickled value of any other type; the reader owns what it unpickles."""

    raw: bytes


@dataclass(frozen=True)
class _SentFuture:
    """A future whose handles are slots or packed batches, and its meta_info."""

    future: DataProtoFuture
    meta_info: bytes | None
    opens: bool


@dataclass(frozen=True)
class _SentHandle:
    slot: Slot


class Outgoing:
    """A packer for the values of one message; `refs` are the stored objects that must arrive with it.

    `ref_of_handle` returns the stored object of a handle, None for other values. `read`: the batches, futures and
    handles that were packed, `handles`: those with a stored object. `is_plain`: see `freeze`.
    """

    def __init__(self, ref_of_handle: Any = None, compress: bool = False) -> None:
        self.refs: list[Any] = []
        self.read: list[Any] = []
        self.handles: list[Any] = []
        self.num_bytes = self.num_bytes_beside = 0
        self.is_plain = True
        self._ref_of_handle, self._compress = ref_of_handle or (lambda value: None), compress
        self._slots: dict[int, Slot] = {}

    def pack(self, value: Any, what: str, opens_futures: bool = True) -> Any:
        """Return the value in packed form. Raises DispatchError or BatchError, naming `what`, if it cannot be sent."""
        if isinstance(value, DataProto):
            try:
                packed = PackedBatch.pack(value, dumps, self._compress)
            except BatchError as error:
                raise BatchError(f"{what}: {error}") from error
            self.num_bytes += packed.num_bytes()
            self.is_plain = self.is_plain and type(value) is DataProto
            self.read.append(value)
            return packed
        if isinstance(value, DataProtoFuture):
            if not value.has_whole_shards:
                raise DispatchError(
                    f"{what} is a future that only this process can read, because its method does not declare the "
                    f"columns it writes; declare writes=(...), or read it (future.get()) and pass the batch."
                )
            return self._pack_future(value.narrow(), opens_futures)
        if (ref := self._ref_of_handle(value)) is not None:
            self.read.append(value)
            self.handles.append(value)
            return _SentHandle(self._slot(ref))
        if (
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and not (value.is_nested or value.is_quantized)
        ):
            return self._counted(PackedColumn.of_tensor(value, self._compress))
        if type(value) is np.ndarray:
            return self._counted(PackedColumn.of_array(what, value, dumps, self._compress))
        if isinstance(value, TensorDictBase):
            value = value.detach().cpu()
        if type(value) in (list, tuple):
            return type(value)(
                self.pack(element, f"[{index}] in {what}", opens_futures) for index, element in enumerate(value)
            )
        if type(value) is dict:
            return {key: self.pack(element, f"[{key!r}] in {what}", opens_futures) for key, element in value.items()}
        if value is None or type(value) in (bool, int, float, str, bytes):
            self.num_bytes_beside += len(value) if isinstance(value, (str, bytes)) else 8
            return value
        pickled = _Pickled(_dumps(value, what))
        self.num_bytes_beside += len(pickled.raw)
        return pickled

    def _pack_future(self, future: DataProtoFuture, opens: bool) -> _SentFuture:
        self.read.append(future)
        meta_info = dumps(future.meta_info) if future.meta_info else None
        self.num_bytes_beside += len(meta_info or b"")
        sent = future.with_handles(self._send_handle)
        sent.meta_info = {}
        return _SentFuture(sent, meta_info, opens)

    def _counted(self, column: PackedColumn) -> PackedColumn:
        self.num_bytes_beside += column.num_bytes
        return column

    @property
    def num_bytes_in_all(self) -> int:
        """The size of the message in bytes: batches and all other values."""
        return self.num_bytes + self.num_bytes_beside

    def _send_handle(self, handle: Any) -> Any:
        if isinstance(handle, HeldBatch):
            packed = PackedBatch.pack(handle.batch, dumps, self._compress)
            self.num_bytes += packed.num_bytes()
            self.is_plain = self.is_plain and type(handle.batch) is DataProto
            return packed
        ref = self._ref_of_handle(handle)
        if ref is None:
            raise DispatchError(
                f"a future that holds {type(handle).__name__} cannot be sent to another process; read it "
                f"(future.get()) and pass the batch."
            )
        self.handles.append(handle)
        return self._slot(ref)

    def also_wait_for(self, refs: Iterable[Any]) -> None:
        """Add objects that are not read but must exist: calls that must succeed before the message arrives."""
        for ref in refs:
            self._slot(ref)

    def _slot(self, ref: Any) -> Slot:
        if ref not in self._slots:
            self._slots[ref] = Slot(len(self.refs))
            self.refs.append(ref)
        return self._slots[ref]


def unpack(value: Any, objects: Sequence[Any]) -> Any:
    """Return a value that the receiver owns from a packed one; `objects` came with the message."""
    if isinstance(value, PackedBatch):
        return value.read()
    if isinstance(value, PackedColumn):
        return value.read(None)
    if isinstance(value, _Pickled):
        return cloudpickle.loads(value.raw)
    if isinstance(value, _SentHandle):
        return unpack(thaw(objects[value.slot.index]), ())
    if isinstance(value, _SentFuture):
        future = value.future.with_handles(
            lambda handle: StoredBatch(thaw(objects[handle.index]) if isinstance(handle, Slot) else handle)
        )
        future.meta_info = {} if value.meta_info is None else cloudpickle.loads(value.meta_info)
        return future.get() if value.opens else future
    if type(value) in (list, tuple):
        return type(value)(unpack(element, objects) for element in value)
    if type(value) is dict:
        return {key: unpack(element, objects) for key, element in value.items()}
    return value


def pickled_class(cls: type) -> bytes:
    """Pickle a class by its name, or by value if other processes cannot import it, e.g. from a notebook or a test."""
    module = sys.modules.get(cls.__module__)
    if module is not None and cls.__module__ != "__main__" and not _is_importable(cls.__module__):
        cloudpickle.register_pickle_by_value(module)  # permanently: later arguments may be objects of the class
    return cloudpickle.dumps(cls)


def _is_importable(name: str) -> bool:
    """Return whether a process with the same `sys.path` can import the module by its name."""
    if name in sys.builtin_module_names or importlib.machinery.FrozenImporter.find_spec(name) is not None:
        return True
    path = None
    for depth in range(len(parts := name.split("."))):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _dumps(value: Any, what: str) -> bytes:
    try:
        if isinstance(value, io.IOBase):
            raise TypeError("an open file")  # pickle would send the contents of a file open for reading
        return dumps(value)
    except Exception as error:  # the object's own code may raise any error
        raise DispatchError(
            f"{what} is a {type(value).__name__}, which cannot be sent to another process ({error}); pass data, and "
            f"build the object inside the worker."
        ) from error


class RemoteTraceback(Exception):
    """The traceback of an error in another process, attached as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class CallFailed(Exception):
    """The error of a worker in pickled form, with the worker's role, rank and node.

    `text` describes the error if it cannot be unpickled by the reader of the result.
    """

    def __init__(self, packed: bytes, text: str, role: str, rank: int, node: str) -> None:
        super().__init__(packed, text, role, rank, node)
        self.packed, self.text, self.role, self.rank, self.node = packed, text, role, rank, node

    def __str__(self) -> str:
        return self.text

    def error(self) -> BaseException:
        """Return the original error with its notes, and with the remote traceback at the end of its chain of causes."""
        try:
            return _loaded(self.packed)
        except Exception:  # the error's class may raise any error outside its own process
            return WorkerError(self.text, role=self.role, rank=self.rank, node=self.node)


def pack_error(error: BaseException, where: str, role: str, rank: int, node: str) -> CallFailed:
    """Return the CallFailed to raise in the worker; an error that cannot be pickled becomes a WorkerError."""
    first = error.__cause__ if isinstance(error, WorkerError) and error.__cause__ is not None else error
    text = f"{where} failed on worker {role}/{rank}: {described(first)}"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # an error whose own text raises
        trace = "".join(traceback.format_tb(error.__traceback__))
    try:
        if not isinstance(error, Exception):
            raise TypeError("worker interrupts must not be re-raised in the driver")
        packed = _dumped(error, trace)
        str(_loaded(packed))
    except Exception:  # the error's class may raise any error
        packed = _dumped(WorkerError(text, role=role, rank=rank, node=node), trace)
    return CallFailed(packed, text, role, rank, node)


def _dumped(error: BaseException, text: str) -> bytes:
    notes, cause = getattr(error, "__notes__", []), error.__cause__
    return cloudpickle.dumps((error, notes, cause, text))


def _loaded(packed: bytes) -> BaseException:
    error, notes, cause, text = cloudpickle.loads(packed)
    if not isinstance(error, BaseException):
        raise TypeError("not an error")
    if notes:
        error.__notes__ = list(notes)
    if cause is not None:
        error.__cause__ = cause
    (cause or error).__cause__ = RemoteTraceback(text)
    return error
