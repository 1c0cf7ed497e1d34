"""The weights of a checkpoint by parameter name, each read on access."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.state_files import read_tree
from hybridflow.checkpoint.store import Checkpoint, open_checkpoint
from hybridflow.checkpoint.stored_tensors import StoredTensors
from hybridflow.errors import CheckpointError


@contextmanager
def stored_weights(source: str | Path | Checkpoint, component: str = "actor") -> Iterator[tuple[StoredTensors, Any]]:
    """Yield the weights of a checkpoint's component, and its `lora` entry; None: the weights are complete.

    Raises CheckpointError if the component does not exist or holds no weights, or if one is not stored as a float.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    path = checkpoint.path_of(component)
    tree = read_tree(path.with_name(path.name + ".json"))
    weights = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(w, dict) and "$tensor" in w for w in weights.values()):
        raise CheckpointError(f"'{path}.json' has no weights under 'model'; hybridflow's training writes them there.")
    with StoredTensors(path) as tensors:
        names = {name: entry["$tensor"] for name, entry in weights.items()}
        if missing := [name for name, stored in names.items() if stored not in tensors]:
            raise CheckpointError(f"the tensors of '{path}' lack {missing[0]}.")
        for name, stored in names.items():
            if not (dtype := tensors.dtype(stored)).is_floating_point:
                raise CheckpointError(
                    f"the weight '{name}' of '{path}' is stored as {dtype}, but training saves floats; "
                    "hybridflow's training did not write it."
                )
        yield tensors.renamed(names), tree.get("lora")
