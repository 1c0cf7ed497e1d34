"""What makes a run the run it is: each checkpoint records it, and training continues only where it is the same.

Fixed are the kind of run, the models it starts from and the algorithm. The loader guards the data itself. Any other
key may change when a run is resumed; what did is logged.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from hybridflow.checkpoint import Checkpoint
from hybridflow.config import Config, leaf_keys
from hybridflow.errors import CheckpointError
from hybridflow.observability import get_logger

logger = get_logger(__name__)

Kind = Literal["train", "sft"]
"""The command that makes such a run."""

FIXED_SECTIONS = {"train": ("model.dtype", "algorithm."), "sft": ("model.dtype",)}
"""Keys, or the beginnings of keys, that a checkpoint must agree with."""

_SAMPLED_BYTES, _NUM_SAMPLES = 1 << 20, 64


def run_identity(config: Config, kind: Kind) -> dict[str, Any]:
    """The identity as plain JSON values: `kind`, `config` (every key) and `models` (a fingerprint for each path)."""
    paths = {"model.path": config.model.path}
    if kind == "train" and config.uses_critic:
        paths["critic.model_path"] = config.critic.model_path or config.model.path
    if kind == "train" and config.uses_reference:
        paths["reference.model_path"] = config.reference.model_path or config.model.path
    if kind == "train" and config.reward.model_path:
        paths["reward.model_path"] = config.reward.model_path
    models = {key: model_fingerprint(path) for key, path in paths.items()}
    return json.loads(json.dumps({"kind": kind, "config": leaf_keys(config), "models": models}))


def require_same_run(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Raise CheckpointError, with every difference, unless the checkpoint is of a run that `identity` continues."""
    before = checkpoint.info
    if before.get("kind") != identity["kind"]:
        made_by = f"made by `hybridflow {before['kind']}`" if "kind" in before else "not made by a training run"
        raise CheckpointError(
            f"'{checkpoint.directory}' was {made_by}, so `hybridflow {identity['kind']}` cannot continue it; "
            "choose another trainer.run_dir."
        )
    changes = {
        key: f"{key} was {before['config'][key]!r} and is {value!r}"
        for key, value in identity["config"].items()
        if key in before["config"] and before["config"][key] != value
    }
    wrong = [line for key, line in changes.items() if key.startswith(FIXED_SECTIONS[identity["kind"]])]
    wrong += [
        f"the model of {key} is another one than '{before['config'][key] or before['config']['model.path']}' held"
        for key, fingerprint in identity["models"].items()
        if before["models"].get(key, fingerprint) != fingerprint
    ]
    if wrong:
        raise CheckpointError(
            f"'{checkpoint.directory}' is of another run: {'; '.join(wrong)}. "
            "Change it back to continue, or choose another trainer.run_dir."
        )
    if changes:
        logger.info("changed since '%s': %s", checkpoint.directory, "; ".join(changes.values()))


def model_fingerprint(directory: str | Path) -> str:
    """32 hexadecimal digits over a model directory's config.json and weights, wherever the directory lies.

    Of a big file only 64 places are read, each of 1 MiB: enough to tell two models apart.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in [Path(directory) / "config.json", *sorted(Path(directory).glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for start in range(0, size, max(size // _NUM_SAMPLES, _SAMPLED_BYTES)):
                file.seek(start)
                digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest()
