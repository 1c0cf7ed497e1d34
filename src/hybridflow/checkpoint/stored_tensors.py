"""The tensors of a state on disk: in one safetensors file, or in a folder with a file of shards for each rank.

Files of shards are those of `torch.distributed.checkpoint` in its safetensors form. No pickle is involved.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.errors import CheckpointError

SHARDS = "DCP_SHARDING_INFO"
"""Where torch keeps, as JSON, the place of each shard in its whole tensor."""


class _Piece(NamedTuple):
    file: Any
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


class StoredTensors(dict[str, Tensor]):
    """Tensors by name, each read, and put together from its shards, on first use into memory of its own.

    Raises CheckpointError for files that cannot be read, and for a tensor of which a part is missing.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._open, self._pieces = ExitStack(), {}
        single = path.with_name(path.name + ".safetensors")
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [single]
        if not files:
            raise CheckpointError(f"'{path}' has no safetensors file in it.")
        for file_path in files:
            try:
                self._add(self._open.enter_context(safe_open(file_path, framework="pt")))
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                self._open.close()
                raise CheckpointError(f"'{file_path}' cannot be read as safetensors: {error}") from error

    def _add(self, file: Any) -> None:
        shards = json.loads((file.metadata() or {}).get(SHARDS, "{}"))
        for name in file.keys():  # noqa: SIM118
            sizes = tuple(file.get_slice(name).get_shape())
            starts = tuple(map(int, shards[name]["saved_offsets"])) if name in shards else (0,) * len(sizes)
            self._pieces.setdefault(name, []).append(_Piece(file, starts, sizes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        pieces = self._pieces[name]
        ends = [[start + size for start, size in zip(piece.starts, piece.sizes, strict=True)] for piece in pieces]
        return tuple(max(end) for end in zip(*ends, strict=True))

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __missing__(self, name: str) -> Tensor:
        # What safetensors gives are views of mapped memory: they would keep a deleted file on the disk.
        pieces = self._pieces[name]
        if len(pieces) == 1 and not any(pieces[0].starts):
            self[name] = pieces[0].file.get_tensor(name).clone()
            return self[name]
        whole, num_found = None, 0
        for piece in pieces:
            part = piece.file.get_tensor(name)
            whole = torch.empty(self.shape(name), dtype=part.dtype) if whole is None else whole
            place = tuple(slice(start, start + size) for start, size in zip(piece.starts, piece.sizes, strict=True))
            whole[place] = part
            num_found += part.numel()
        assert whole is not None
        if num_found != whole.numel():
            raise CheckpointError(
                f"'{name}' has {whole.numel()} numbers and its shards {num_found}: a file of shards is missing."
            )
        self[name] = whole
        return whole

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()


class StoredShapes(dict[str, Tensor]):
    """As `StoredTensors`, but tensors without contents: what a state would be."""

    def __init__(self, stored: StoredTensors) -> None:
        super().__init__()
        self._stored = stored

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __missing__(self, name: str) -> Tensor:
        return torch.empty(self._stored.shape(name), device="meta")
