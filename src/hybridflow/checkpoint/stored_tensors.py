"""The tensors of a state on disk: in one safetensors file, or in a folder with a file of shards for each rank.

Files of shards are those of `torch.distributed.checkpoint` in its safetensors form. No pickle is involved.
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

from hybridflow.errors import CheckpointError

SHARDS = "DCP_SHARDING_INFO"
"""Where torch keeps, as JSON, the place of each shard in its whole tensor."""


class _Piece(NamedTuple):
    """A shard of a tensor: the open file, its name there, and its place in the whole tensor."""

    file: Any
    name: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def read(self) -> Tensor:
        return self.file.get_tensor(self.name)


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name; each use reads one from the files, puts it together from its shards, and keeps nothing.

    Raises CheckpointError for files that cannot be read, and for a tensor of which a part is missing.
    """

    def __init__(self, path: Path) -> None:
        self._open = ExitStack()
        self._pieces: dict[str, list[_Piece]] = {}
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
            sizes = file.get_slice(name).get_shape()
            starts = tuple(map(int, shards[name]["saved_offsets"])) if name in shards else (0,) * len(sizes)
            ends = tuple(start + size for start, size in zip(starts, sizes, strict=True))
            self._pieces.setdefault(name, []).append(_Piece(file, name, starts, ends))

    def renamed(self, names: Mapping[str, str]) -> "StoredTensors":
        """Some of the tensors under other names: new name -> name here."""
        renamed = copy(self)
        renamed._pieces = {new: self._pieces[name] for new, name in names.items()}
        return renamed

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor, which is not read for it."""
        return tuple(map(max, zip(*(piece.ends for piece in self._pieces[name]), strict=True)))

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> Tensor:
        # What safetensors gives are views of mapped memory: they would keep a deleted file on the disk.
        pieces = self._pieces[name]
        if len(pieces) == 1 and not any(pieces[0].starts):
            return pieces[0].read().clone()
        whole, num_found = None, 0
        for piece in pieces:
            part = piece.read()
            whole = torch.empty(self.shape(name), dtype=part.dtype) if whole is None else whole
            whole[tuple(map(slice, piece.starts, piece.ends))] = part
            num_found += part.numel()
        assert whole is not None
        if num_found != whole.numel():
            raise CheckpointError(
                f"'{name}' has {whole.numel()} numbers and its shards {num_found}: a file of shards is missing."
            )
        return whole

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()
