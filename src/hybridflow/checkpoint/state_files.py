"""A state on disk: `NAME.safetensors`, or a folder `NAME` of shards, with the tensors; `NAME.json` with all else."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from hybridflow.checkpoint.disk_space import describe_bytes, describe_free_space
from hybridflow.checkpoint.json_document import read_document
from hybridflow.checkpoint.state import join_state, split_state
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointError

STATE_FORMAT = "hybridflow-state"
STATE_VERSION = 1


def save_state(state: Any, path: str | Path) -> None:
    """Write `path`.safetensors and `path`.json; see `split_state` for what a state may hold.

    Not atomic by itself: `CheckpointStore.begin` gives a directory that is. Raises CheckpointError for a value that
    cannot be saved, before anything is written, and for a write that fails, with the space it needed and found.
    """
    tensor_file, tree_file = _files(path)
    tree, tensors = split_state(state)
    text = tree_text(tree)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + len(text)
    try:
        save_file(tensors, tensor_file, metadata={"format": STATE_FORMAT})
        tree_file.write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        free = f", {describe_free_space(tensor_file.parent)}" if tensor_file.parent.is_dir() else ""
        raise CheckpointError(f"cannot write '{path}' ({describe_bytes(num_bytes)} needed{free}): {error}") from error


def load_state(path: str | Path, key: str | None = None) -> Any:
    """The state that `save_state` wrote, tensors on the CPU; with `key` only that entry, reading no other tensors.

    Raises CheckpointError naming the file if one is missing, damaged, of another format or of a newer version.
    """
    _, tree_file = _files(path)
    tree = read_tree(tree_file)
    if key is not None:
        if not isinstance(tree, dict) or key not in tree:
            raise CheckpointError(
                f"'{tree_file}' has no entry '{key}'; it has {', '.join(tree) if isinstance(tree, dict) else 'none'}."
            )
        tree = tree[key]
    with StoredTensors(Path(path)) as stored:
        try:
            return join_state(tree, stored)
        except (CheckpointError, ValueError) as error:
            raise CheckpointError(f"'{tree_file}' and its tensors do not fit together: {error}") from error
        except SafetensorError as error:
            raise CheckpointError(f"the tensors of '{tree_file}' cannot be read: {error}") from error


def tree_text(tree: Any) -> str:
    """What stands in the JSON file of a state."""
    return json.dumps({"format": STATE_FORMAT, "version": STATE_VERSION, "state": tree}, allow_nan=False)


def read_tree(path: Path) -> Any:
    """The tree in the JSON file of a state. Raises CheckpointError."""
    document = read_document(path, STATE_FORMAT, STATE_VERSION)
    if "state" not in document:
        raise CheckpointError(f"'{path}' has no 'state'; hybridflow did not write it.")
    return document["state"]


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    return path.with_name(path.name + ".safetensors"), path.with_name(path.name + ".json")
