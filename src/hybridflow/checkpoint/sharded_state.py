"""States whose tensors are shared by several ranks: every rank writes its own shards, any number of ranks read them.

`NAME/` has a safetensors file for each rank, by `torch.distributed.checkpoint`; `NAME.json` is what other states have.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor

from hybridflow.checkpoint.disk_space import describe_free_space
from hybridflow.checkpoint.state import join_state, split_state
from hybridflow.checkpoint.state_files import read_tree, tree_text
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointError

# It announces every read and write.
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)


def save_sharded_state(state: Any, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the shards of a state with DTensors; every rank calls it. What is not sharded is equal on all ranks.

    `group`: where the ranks meet for it, all of them; a save beside training needs one of its own.
    Raises CheckpointError on every rank if one cannot write.
    """
    path = Path(path)
    tree, tensors = split_state(state)
    problem: tuple[str, int] = "", 0
    try:
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        save(dict(tensors), storage_writer=writer, process_group=group)
        if dist.get_rank() == 0:
            path.with_name(path.name + ".json").write_text(tree_text(tree), encoding="utf-8")
    except (OSError, CheckpointException) as error:
        free = f" ({describe_free_space(path.parent)})" if path.parent.is_dir() else ""
        problem = f"cannot write '{path}'{free}: {_last_line(error)}", _errno(error)
    problems = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=group)
    texts, numbers = (list(dict.fromkeys(filter(None, told))) for told in zip(*problems, strict=True))
    if texts:
        raise CheckpointError("; ".join(texts)) from (OSError(numbers[0], os.strerror(numbers[0])) if numbers else None)


def describe_state(path: str | Path) -> Any:
    """The state that was saved, with tensors that have a shape and no contents. Raises CheckpointError."""
    path = Path(path)
    with StoredTensors(path) as stored:
        shapes = {name: torch.empty(stored.shape(name), device="meta") for name in stored}
    return join_state(read_tree(path.with_name(path.name + ".json")), shapes)


@torch.no_grad()
def read_state_into(state: Any, path: str | Path) -> None:
    """Fill the tensors of a state, DTensors or not, from what any number of ranks saved; every rank calls it.

    The stored state has the structure and the shapes of this one: compare it with `describe_state` before. Raises
    CheckpointError.
    """
    path = Path(path)
    _, tensors = split_state(state)
    if path.is_dir():
        try:
            load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)))
        except (OSError, CheckpointException, json.JSONDecodeError) as error:
            raise CheckpointError(f"'{path}' cannot be read: {_last_line(error)}") from error
        return
    with StoredTensors(path) as stored:
        for name, tensor in tensors.items():
            whole = stored[name]
            if isinstance(tensor, DTensor):
                whole = whole.to(tensor.device_mesh.device_type)
                whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.copy_(whole)


def _last_line(error: BaseException) -> str:
    """What a rank's error says, without the tracebacks that DCP puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _errno(error: BaseException) -> int:
    """The number of the operating system's error, 0 for any other; DCP keeps that of each rank."""
    of_ranks = [error, *(failure for failure, _ in getattr(error, "failures", {}).values())]
    return next((e.errno for e in of_ranks if isinstance(e, OSError) and e.errno), 0)
