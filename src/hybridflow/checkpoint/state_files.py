"""States on disk: tensors in `NAME.safetensors` or a folder `NAME` of shards, everything else in `NAME.json`."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from hybridflow.checkpoint.saved_files import read_document
from hybridflow.checkpoint.state import join_state, split_state
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointError
from hybridflow.runtime.files import describe_bytes, describe_free_space
from hybridflow.runtime.progress import note_progress

STATE_FORMAT = "hybridflow-state"
STATE_VERSION = 1


def save_state(state: Any, path: str | Path) -> list[Path]:
    """Write a state to `path`.safetensors and `path`.json, and return both; see `split_state` for the supported types.

    Not atomic; write into a directory of `CheckpointStore.begin` for an atomic save. Raises CheckpointError for an
    unsupported value, before anything is written, and for a failed write, with the needed and the free space.
    """
    tensor_file, tree_file = _files(path)
    tree, tensors = split_state(state)
    text = tree_text(tree)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + len(text)
    try:
        save_file(tensors, tensor_file, metadata={"format": STATE_FORMAT})
        note_progress()
        tree_file.write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        free = f", {describe_free_space(tensor_file.parent)}" if tensor_file.parent.is_dir() else ""
        raise CheckpointError(f"cannot write '{path}' ({describe_bytes(num_bytes)} needed{free}): {error}") from error
    return [tensor_file, tree_file]


def load_state(path: str | Path, key: str | None = None) -> Any:
    """Load a state that `save_state` wrote, with tensors on the CPU; with `key`, load only that entry.

    Raises CheckpointError, with the file's name, if a file is missing, damaged, of another format or a newer version.
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
            raise CheckpointError(f"'{tree_file}' does not match its tensors: {error}") from error
        except SafetensorError as error:
            raise CheckpointError(f"the tensors of '{tree_file}' cannot be read: {error}") from error


def tree_text(tree: Any) -> str:
    """Return the text of a state's JSON file."""
    return json.dumps({"format": STATE_FORMAT, "version": STATE_VERSION, "state": tree}, allow_nan=False)


def read_tree(path: Path) -> Any:
    """Read the tree from the JSON file of a state. Raises CheckpointError."""
    document = read_document(path, STATE_FORMAT, STATE_VERSION)
    if "state" not in document:
        raise CheckpointError(f"'{path}' has no 'state'; hybridflow did not write it.")
    return document["state"]


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    return path.with_name(path.name + ".safetensors"), path.with_name(path.name + ".json")
