"""Which model a directory holds, and whether it is the one that adapters were trained beside."""

import hashlib
from pathlib import Path

from hybridflow.checkpoint.store import Checkpoint
from hybridflow.errors import CheckpointConfigError

_SAMPLED_BYTES, _NUM_SAMPLES = 1 << 20, 64


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


def require_same_base(checkpoint: Checkpoint, model_dir: str | Path) -> None:
    """Raise CheckpointError if the checkpoint's run started from another model than that of the directory.

    Adapters fit any model of their shapes, and say nothing beside another.
    """
    models = checkpoint.info.get("models")
    recorded = models.get("model.path") if isinstance(models, dict) else None
    if recorded is not None and recorded != model_fingerprint(model_dir):
        config = checkpoint.info.get("config")
        named = f", '{config['model.path']}'" if isinstance(config, dict) and "model.path" in config else ""
        raise CheckpointConfigError(
            f"the adapters of '{checkpoint.directory}' were trained beside another model than '{model_dir}' holds; "
            f"give the one that training started from{named}."
        )
