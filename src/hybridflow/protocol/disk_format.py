"""File format of a batch: safetensors for tensors and numeric arrays, JSON for structure. Loading executes no code.

The file holds the tensors "0", "1", ... and the tensor "structure", JSON as UTF-8 bytes that describes them.
"""

import json
import os
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict

from hybridflow.errors import BatchError
from hybridflow.protocol.batch import Batch, Batches, tensors_of
from hybridflow.runtime.files import fsync_path, sort_metadata

FORMAT, VERSION = "hybridflow.DataProto", "1"
STRUCTURE = "structure"
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_DTYPES = {"bool", *_INTEGERS, "float16", "bfloat16", "float32", "float64"}
_TEXTS = {f"${kind.__name__}": kind.fromisoformat for kind in (datetime, date, time)} | {"$Decimal": Decimal}
_SAVABLE = "None, bool, int, float, str, bytes, times, decimals, list, tuple, set, dict, numbers, arrays and tensors"


def save_batch(data: Batch, filepath: str | os.PathLike) -> None:
    """Save a batch through a temporary file and a rename, so that a reader never sees a partial file.

    Raises BatchError for a value that cannot be encoded and for a file that cannot be written.
    """
    writer = _Writer()
    structure = {
        "num_rows": None if data.batch is None else data.batch.batch_size[0],
        "batch": [[name, writer.attach(tensor, f"batch[{name!r}]")] for name, tensor in tensors_of(data.batch).items()],
        "non_tensor_batch": [
            [name, writer.encode(array, f"non_tensor_batch[{name!r}]")] for name, array in data.non_tensor_batch.items()
        ],
        "meta_info": writer.encode(data.meta_info, "meta_info"),
        "auto_padding": data.auto_padding,
    }
    text = bytearray(json.dumps(structure).encode())
    writer.tensors[STRUCTURE] = torch.frombuffer(text, dtype=torch.uint8)
    path = Path(filepath)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(writer.tensors, temporary, metadata={"format": FORMAT, "version": VERSION})
        sort_metadata(temporary)
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    except (OSError, SafetensorError) as error:
        raise BatchError(f"{path}: the batch could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_batch(cls: type[Batches], filepath: str | os.PathLike) -> Batches:
    """Return the saved batch, on the CPU. Raises BatchError for a missing, truncated or foreign file."""
    try:
        with safe_open(os.fspath(filepath), framework="pt") as file:
            _check_version(file.metadata() or {}, filepath)
            # The file is memory mapped; the batch must outlive it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BatchError(f"{filepath}: not a readable batch; missing, truncated or not a DataProto: {error}") from error
    try:
        structure = json.loads(bytes(tensors.pop(STRUCTURE).numpy()))
        batch = None
        if structure["num_rows"] is not None:
            columns = {name: tensors[key] for name, key in structure["batch"]}
            batch = TensorDict(columns, [structure["num_rows"]])
        arrays = {name: _decode(array, tensors) for name, array in structure["non_tensor_batch"]}
        meta_info = _decode(structure["meta_info"], tensors)
        return cls(batch, arrays, meta_info, structure["auto_padding"])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"{filepath}: the structure of the batch is damaged: {error!r}") from error


def _check_version(metadata: dict[str, str], filepath: str | os.PathLike) -> None:
    if metadata.get("format") != FORMAT:
        raise BatchError(f"{filepath}: this safetensors file is not a saved DataProto.")
    if metadata.get("version") != VERSION:
        raise BatchError(
            f"{filepath}: saved in format version {metadata.get('version')}; this release reads version {VERSION}."
        )


class _Writer:
    """An encoder of values to JSON; it collects tensors and numeric arrays separately."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._storages: set[int] = set()

    def attach(self, tensor: torch.Tensor, where: str) -> str:
        if str(tensor.dtype).removeprefix("torch.") not in _DTYPES:
            raise BatchError(
                f"{where} is {tensor.dtype}, which cannot be saved; convert it to one of {sorted(_DTYPES)}."
            )
        tensor = tensor.detach().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in self._storages:  # safetensors rejects tensors that share memory
            tensor = tensor.clone()
        self._storages.add(tensor.untyped_storage().data_ptr())
        key = str(len(self.tensors))
        self.tensors[key] = tensor
        return key

    def encode(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return self._encode_items(value, where)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
            return {"$dict": self._encode_items([list(pair) for pair in value.items()], where)}
        if kind in (tuple, set):
            return {f"${kind.__name__}": self._encode_items(value, where)}
        if kind.__module__ in ("datetime", "decimal") and (tag := f"${kind.__name__}") in _TEXTS:
            return {tag: str(value)}
        if kind is bytes:
            return {"$bytes": value.decode("latin-1")}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self.attach(value, where)}
        if isinstance(value, np.generic):
            return {"$scalar": self._encode_array(np.asarray(value), where)}
        if kind is np.ndarray:
            return self._encode_array(value, where)
        raise BatchError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved; savable are {_SAVABLE}."
        )

    def _encode_items(self, items: Any, where: str) -> list:
        return [self.encode(item, f"{where}[{index}]") for index, item in enumerate(items)]

    def _encode_array(self, array: np.ndarray, where: str) -> dict:
        if array.dtype.kind == "O":
            return {"$objects": [list(array.shape), self._encode_items(array.ravel().tolist(), where)]}
        if array.dtype.kind == "U":
            return {"$strings": [list(array.shape), array.dtype.str, array.ravel().tolist()]}
        if array.dtype.name not in _DTYPES:
            raise BatchError(f"{where} has the dtype {array.dtype}, which cannot be saved; convert it.")
        native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
        return {"$array": self.attach(torch.from_numpy(native), where)}


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag in _DECODERS:
        return _DECODERS[tag](value[tag], tensors)
    return {key: _decode(item, tensors) for key, item in value.items()}


def _decode_objects(content: list, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    shape, items = content
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = _decode(item, tensors)
    return array.reshape(shape)


_DECODERS: dict[str, Callable[[Any, dict[str, torch.Tensor]], Any]] = {
    "$dict": lambda pairs, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in pairs},
    "$tuple": lambda items, tensors: tuple(_decode(item, tensors) for item in items),
    "$set": lambda items, tensors: {_decode(item, tensors) for item in items},
    "$bytes": lambda text, tensors: text.encode("latin-1"),
    "$tensor": lambda key, tensors: tensors[key],
    "$scalar": lambda array, tensors: _decode(array, tensors)[()],
    "$array": lambda key, tensors: tensors[key].numpy(),
    "$objects": _decode_objects,
    "$strings": lambda content, tensors: np.array(content[2], dtype=content[1]).reshape(content[0]),
    **{tag: lambda text, tensors, read=read: read(text) for tag, read in _TEXTS.items()},
}
