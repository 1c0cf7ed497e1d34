"""Lossless conversion of a nested state to JSON and tensors, and back, and comparison of states; without code.

In the JSON tree a dictionary whose only key starts with "$" encodes a value that JSON cannot express; see `_TAGS`.
"""

import functools
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridflow.errors import CheckpointError
from hybridflow.runtime.boxes import local

TENSOR_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.complex64),
    }
)
"""Dtypes that a state may hold, as tensors or numpy arrays."""

_TAGS = {
    "$tensor": "a tensor: its name",
    "$array": "a numpy array: the name of its tensor",
    "$scalar": "a numpy scalar: the name of its tensor",
    "$tuple": "a tuple: its items",
    "$float": "an infinity or a NaN: its 8 bytes, most significant first, in hexadecimal",
    "$int": "an integer of more than 64 bits, in hexadecimal",
    "$dict": "a dictionary with a key that starts with '$'",
}


def split_state(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state into a JSON tree and tensors by name.

    A state consists of dictionaries with string keys, lists, tuples, numbers, strings, bools, None, tensors, numpy
    arrays and numpy scalars. The returned tensors are detached, dense, contiguous and on the CPU. No two share memory,
    but they may share memory with the state. A tensor that occurs twice is stored once. Raises CheckpointError, with
    the path inside the state, for any other value.
    """
    splitter = _Splitter()
    return splitter.split(state, ()), splitter.tensors


def tensors_to_fill(state: Any) -> dict[str, Tensor]:
    """Return the tensors of a state themselves, on any device, by the names under which `split_state` stores them."""
    splitter = _Splitter(copies=False)
    splitter.split(state, ())
    return splitter.tensors


def join_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `split_state`: restore structure, types, dtypes and bits; a tensor that occurred twice is shared again.

    A parameter is restored as a plain tensor, a dictionary subclass as a dict, a non-contiguous tensor as a contiguous
    one. Each tensor is read from `tensors` once. Raises CheckpointError if a tensor is missing or a tag is unknown.
    """

    @functools.cache
    def tensor_of(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"the tensor '{name}' is missing.")
        return tensors[name]

    return _join(tree, tensor_of)


def _join(tree: Any, tensor_of: Callable[[str], Tensor]) -> Any:
    if isinstance(tree, list):
        return [_join(item, tensor_of) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if not tag.startswith("$"):
        return {key: _join(value, tensor_of) for key, value in tree.items()}
    match tag, tree[tag]:
        case "$tensor", str(name):
            return tensor_of(name)
        case "$array", str(name):
            return tensor_of(name).numpy()
        case "$scalar", str(name):
            return tensor_of(name).numpy()[()]
        case "$tuple", list(items):
            return tuple(_join(item, tensor_of) for item in items)
        case "$dict", dict(items):
            return {key: _join(value, tensor_of) for key, value in items.items()}
        case "$float", str(digits) if len(digits) == 16:
            return struct.unpack(">d", bytes.fromhex(digits))[0]
        case "$int", str(digits):
            return int(digits, 16)
    kind = type(tree[tag]).__name__
    raise CheckpointError(f"'{tag}' with a {kind} is not a known tag; valid tags: {', '.join(_TAGS)}.")


class _Splitter:
    def __init__(self, *, copies: bool = True) -> None:
        self._copies = copies  # of tensors that are not dense, contiguous and on the CPU
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple, str] = {}
        self._alive: list[Tensor] = []  # an address identifies a tensor only while the tensor is alive
        self._storages: set[int] = set()

    def split(self, value: Any, path: tuple[str | int, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind in (list, tuple):
            items = [self.split(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if isinstance(value, dict):
            return self._split_dict(value, path)
        if isinstance(value, DTensor):  # `save_sharded_state` writes its shards
            name = self._free_name("/".join(map(str, path)))
            self.tensors[name] = value.detach()
            return {"$tensor": name}
        if kind in (Tensor, torch.nn.Parameter):
            return {"$tensor": self._add(value.detach(), path)}
        if kind is np.ndarray:
            return {"$array": self._add(_tensor_of(value, path), path)}
        if isinstance(value, np.generic):
            return {"$scalar": self._add(_tensor_of(np.asarray(value), path), path)}
        raise CheckpointError(f"{_place(path)} is a {_type_name(kind)}, which cannot be saved; {_hint(value)}")

    def _split_dict(self, value: dict, path: tuple[str | int, ...]) -> dict:
        for key in value:
            if type(key) is not str:
                raise CheckpointError(
                    f"{_place(path)} has the key {key!r} of type {_type_name(type(key))}; keys must be str."
                )
        items = {key: self.split(item, (*path, key)) for key, item in value.items()}
        return {"$dict": items} if any(key.startswith("$") for key in items) else items

    def _add(self, tensor: Tensor, path: tuple[str | int, ...]) -> str:
        has_data = tensor.device.type != "meta" or not self._copies
        if tensor.layout != torch.strided or not has_data or tensor.dtype not in TENSOR_DTYPES:
            known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in TENSOR_DTYPES))
            raise CheckpointError(
                f"{_place(path)} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}; "
                f"only dense tensors with data, of {known}, can be saved."
            )
        storage = tensor.untyped_storage()
        memory = (tensor.device, storage.data_ptr() or storage._cdata, tensor.storage_offset())
        identity = (*memory, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and identity in self._names:
            return self._names[identity]
        name = self._free_name("/".join(str(part) for part in path) or "state")
        self.tensors[name] = self._dense(tensor) if self._copies else tensor
        self._names[identity] = name
        self._alive.append(tensor)
        return name

    def _dense(self, tensor: Tensor) -> Tensor:
        dense = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        if dense.numel() and dense.untyped_storage().data_ptr() in self._storages:
            dense = dense.clone()
        self._storages.add(dense.untyped_storage().data_ptr())
        return dense

    def _free_name(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.tensors or name == "__metadata__":  # a reserved word of safetensors
            count += 1
            name = f"{wanted}#{count}"
        return name


def _tensor_of(array: np.ndarray, path: tuple[str | int, ...]) -> Tensor:
    if array.dtype.kind not in "biufc" or not array.dtype.isnative or array.dtype.itemsize > 8:
        raise CheckpointError(
            f"{_place(path)} holds numpy's {array.dtype!r}; only bool, integer, float and complex64 in native "
            "byte order can be saved. Save text as a list of str."
        )
    # torch requires writable memory; copy() keeps 0 dimensions, ascontiguousarray does not.
    plain = array if array.flags.c_contiguous and array.flags.writeable else array.copy(order="C")
    return torch.from_numpy(plain)


def _place(path: tuple[str | int, ...]) -> str:
    return "state" + "".join(f"[{part!r}]" for part in path)


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _hint(value: Any) -> str:
    if isinstance(value, Tensor):
        return "convert it to a plain tensor."
    for plain in (bool, int, float, str, list, tuple):
        if isinstance(value, plain):
            return f"convert it with {plain.__name__}()."
    return "use dict, list, tuple, int, float, str, bool, None, tensors or numpy arrays."


def map_tensors(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a state of the same structure with `change(tensor)` in place of each tensor, in their order."""
    if isinstance(state, Mapping):
        return {key: map_tensors(value, change) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(value, change) for value in state)
    return change(state) if isinstance(state, Tensor) else state


def zeros_like_state(state: Any) -> Any:
    """Return a state of the same structure, with zeros in place of its tensors, sharded and placed alike."""
    return map_tensors(state, torch.zeros_like)


def first_difference(state: Any, other: Any) -> str:
    """Return the name of the first tensor whose bits differ, "its structure" for another difference, "" if none.

    Of sharded tensors, the shards of this rank are compared.
    """
    tensors, others = tensors_to_fill(state), tensors_to_fill(other)
    if tensors.keys() != others.keys() or split_state(state)[0] != split_state(other)[0]:
        return "its structure"
    for name, tensor in tensors.items():
        shard, stored = local(tensor), local(others[name]).to(local(tensor).device)
        if shard.dtype != stored.dtype or not torch.equal(_bits(shard), _bits(stored)):
            return f"tensor '{name}'"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which are equal for equal NaNs, and differ for 0 and -0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
