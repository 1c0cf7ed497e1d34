"""The stored tensors of a state: one safetensors file, or a folder with one file of shards per rank.

Shards are in the safetensors format of `torch.distributed.checkpoint`. No pickle is involved.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.checkpoint.saved_files import unreadable
from hybridflow.errors import CheckpointError
from hybridflow.runtime.plain_files import require_plain_file

SHARDS = "DCP_SHARDING_INFO"
"""Metadata key under which torch stores, as JSON, the offsets of each shard in its tensor."""
OFFSETS = "saved_offsets"


class _Shard(NamedTuple):
    """A shard of a tensor: the open file, its name in the file, and its index range in the assembled tensor."""

    file: Any
    name: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def read(self) -> Tensor:
        return self.file.get_tensor(self.name)


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name. Each access reads the tensor, assembles it from its shards, and caches nothing.

    Raises CheckpointError for files that cannot be read, and for a tensor with a missing shard.
    """

    def __init__(self, path: Path) -> None:
        self._open = ExitStack()
        self._shards: dict[str, list[_Shard]] = {}
        single = path.with_name(path.name + ".safetensors")
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [single]
        if not files:
            raise CheckpointError(f"'{path}' has no safetensors file.")
        for file_path in files:
            try:
                require_plain_file(file_path)  # opened by name; a FIFO would block
                self._add(self._open.enter_context(safe_open(file_path, framework="pt")))
            except OSError as error:
                self._open.close()
                raise unreadable(file_path, error) from error
            except (SafetensorError, ValueError, KeyError, TypeError) as error:
                self._open.close()
                raise CheckpointError(f"'{file_path}' cannot be read as safetensors: {error}.") from error

    def _add(self, file: Any) -> None:
        offsets = json.loads((file.metadata() or {}).get(SHARDS, "{}"))
        for name in file.keys():  # noqa: SIM118
            sizes = file.get_slice(name).get_shape()
            starts = tuple(map(int, offsets[name][OFFSETS])) if name in offsets else (0,) * len(sizes)
            ends = tuple(start + size for start, size in zip(starts, sizes, strict=True))
            self._shards.setdefault(name, []).append(_Shard(file, name, starts, ends))

    def renamed(self, names: Mapping[str, str]) -> "StoredTensors":
        """Return a mapping with some of the tensors under new names; `names` is new name -> current name."""
        renamed = copy(self)
        renamed._shards = {new: self._shards[name] for new, name in names.items()}
        return renamed

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, assembled from its shards, without reading it."""
        return tuple(map(max, zip(*(shard.ends for shard in self._shards[name]), strict=True)))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading it. Raises CheckpointError if its shards differ in dtype."""
        dtypes = {str(dtype): dtype for dtype in (shard.read().dtype for shard in self._shards[name])}  # mapped memory
        if len(dtypes) > 1:
            raise CheckpointError(f"the shards of '{name}' have different dtypes: {', '.join(sorted(dtypes))}.")
        return next(iter(dtypes.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._shards

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, name: str) -> Tensor:
        # Copies, because safetensors returns views of mapped memory, which would keep a deleted file on the disk.
        shards = self._shards[name]
        if len(shards) == 1 and not any(shards[0].starts):
            return shards[0].read().clone()
        whole, num_found = None, 0
        for shard in shards:
            part = shard.read()
            whole = torch.empty(self.shape(name), dtype=self.dtype(name)) if whole is None else whole
            whole[tuple(map(slice, shard.starts, shard.ends))] = part
            num_found += part.numel()
        assert whole is not None
        if num_found != whole.numel():
            raise CheckpointError(
                f"'{name}' has {whole.numel()} elements, but its shards have {num_found}; a file of shards is missing."
            )
        return whole

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()
