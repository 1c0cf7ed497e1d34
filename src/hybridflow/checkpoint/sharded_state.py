"""Sharded states: every rank writes its shards, and a different number of ranks can read them.

`NAME/` has one safetensors file per rank, in the format of `torch.distributed.checkpoint`, which reads them;
`NAME.json` is the same as for other states.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor

from hybridflow.checkpoint.saved_files import require_shared
from hybridflow.checkpoint.state import join_state, split_state, tensors_to_fill
from hybridflow.checkpoint.state_files import read_tree, tree_text
from hybridflow.checkpoint.stored_tensors import OFFSETS, SHARDS, StoredTensors
from hybridflow.errors import CheckpointError
from hybridflow.runtime.boxes import box_of_shard, local
from hybridflow.runtime.files import describe_free_space, sort_metadata
from hybridflow.runtime.progress import note_progress

# It logs every read.
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)


def save_sharded_state(state: Any, path: str | Path) -> list[Path]:
    """Write the shards of a state with DTensors that belong to this rank, and return the files; every rank calls it.

    Of equal shards on several ranks, the first of these ranks writes one; rank 0 writes values that are not sharded,
    which must be equal on all ranks. The ranks do not wait for each other, so a rank may write in the background, or
    fail alone. The parent directory must exist. Raises CheckpointError if this rank cannot write.
    """
    path, rank = Path(path), dist.get_rank()
    require_shared(path.parent)
    tree, tensors = split_state(state)
    own = _own_shards(tensors)
    written: list[Path] = []
    try:
        path.mkdir(exist_ok=True)
        if own:
            file = path / f"shard-{rank + 1:05d}.safetensors"
            offsets = {name: {OFFSETS: starts} for name, (_, starts) in own.items()}
            save_file(
                {name: shard for name, (shard, _) in own.items()},
                file,
                metadata={"format": "pt", SHARDS: json.dumps(offsets)},
            )
            sort_metadata(file)
            note_progress()
            written.append(file)
        if rank == 0:
            tree_file = path.with_name(f"{path.name}.json")
            tree_file.write_text(tree_text(tree), encoding="utf-8")
            written.append(tree_file)
    except (OSError, SafetensorError) as error:
        free = f" ({describe_free_space(path.parent)})" if path.parent.is_dir() else ""
        raise CheckpointError(f"cannot write '{path}'{free}: {error}") from error
    return written


def _own_shards(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, list[int]]]:
    """Return the shards that this rank writes, each with its first index in every dimension of the whole tensor."""
    own: dict[str, tuple[Tensor, list[int]]] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            if dist.get_rank() == 0:
                own[name] = tensor, [0] * tensor.dim()
            continue
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "every rank is in the mesh"
        replicas = [
            place for place, of_axis in zip(coordinate, tensor.placements, strict=True) if of_axis.is_replicate()
        ]
        shard = local(tensor)
        if not any(replicas) and shard.numel():
            own[name] = shard.cpu().contiguous(), [first for first, _ in box_of_shard(tensor)]
    return own


def describe_state(path: str | Path) -> Any:
    """Return the saved state with meta tensors: shapes and dtypes without contents. Raises CheckpointError."""
    path = Path(path)
    with StoredTensors(path) as stored:
        described = {n: torch.empty(stored.shape(n), dtype=stored.dtype(n), device="meta") for n in stored}
    return join_state(read_tree(path.with_name(path.name + ".json")), described)


@torch.no_grad()
def read_state_into(state: Any, path: str | Path) -> None:
    """Fill the tensors of a state, DTensors or not, from a saved state of any number of ranks; every rank calls it.

    The saved state must have the same structure and shapes; check it with `describe_state` before. Raises
    CheckpointError if a file cannot be read.
    """
    path = Path(path)
    tensors = tensors_to_fill(state)
    if path.is_dir():
        try:
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)))
        except (OSError, CheckpointException, json.JSONDecodeError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise CheckpointError(f"'{path}' cannot be read: {lines[-1]}") from error  # DCP puts tracebacks before it
        return
    with StoredTensors(path) as stored:
        for name, tensor in tensors.items():
            whole = stored[name]
            if isinstance(tensor, DTensor):
                whole = whole.to(tensor.device_mesh.device_type)
                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(whole)
