"""Sharded states: every rank writes its shards, and a different number of ranks can read them.

`NAME/` has one safetensors file per rank, written by `torch.distributed.checkpoint`; `NAME.json` is the same as for
other states.
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
from hybridflow.checkpoint.saved_files import require_shared
from hybridflow.checkpoint.state import join_state, split_state, tensors_to_fill
from hybridflow.checkpoint.state_files import read_tree, tree_text
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointError
from hybridflow.runtime import note_progress, sort_metadata

# It logs every read and write.
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)


def save_sharded_state(state: Any, path: str | Path, group: dist.ProcessGroup | None = None) -> list[Path]:
    """Write the shards of a state with DTensors, and return the files that this rank wrote; every rank calls it.

    Values that are not sharded must be equal. The parent directory must exist.

    `group` is a process group of all ranks; a background save needs a separate one, since training uses the default.
    Raises CheckpointError on every rank if one cannot write.
    """
    path, tree_file = Path(path), Path(path).with_name(f"{Path(path).name}.json")
    tree, tensors = split_state(state)
    problem: tuple[str, int] = "", 0
    written: list[Path] = []
    try:
        require_shared(path.parent)
    except CheckpointError as error:
        problem = str(error), 0
    _raise_together(problem, group)  # before the first collective of the save
    try:
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        save(dict(tensors), storage_writer=writer, process_group=group)
        written = sorted(path.glob(f"shard-{dist.get_rank(group) + 1:05d}-*.safetensors"))  # none without shards
        for file in written:
            sort_metadata(file)
            note_progress()
        if dist.get_rank() == 0:
            tree_file.write_text(tree_text(tree), encoding="utf-8")
            written.append(tree_file)
    except (OSError, CheckpointException) as error:
        free = f" ({describe_free_space(path.parent)})" if path.parent.is_dir() else ""
        problem = f"cannot write '{path}'{free}: {_last_line(error)}", _errno(error)
    _raise_together(problem, group)
    return written


def _raise_together(problem: tuple[str, int], group: dist.ProcessGroup | None) -> None:
    """Raise CheckpointError on every rank if one has a problem: a text and its errno, or 0."""
    problems = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(problems, problem, group=group)
    texts, codes = (list(dict.fromkeys(filter(None, column))) for column in zip(*problems, strict=True))
    if texts:
        raise CheckpointError("; ".join(texts)) from (OSError(codes[0], os.strerror(codes[0])) if codes else None)


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
    """Return the message of a rank's error, without the tracebacks that DCP puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _errno(error: BaseException) -> int:
    """Return the errno of an operating system error, also from a DCP error of several ranks; 0 for other errors."""
    of_ranks = [error, *(failure for failure, _ in getattr(error, "failures", {}).values())]
    return next((e.errno for e in of_ranks if isinstance(e, OSError) and e.errno), 0)
