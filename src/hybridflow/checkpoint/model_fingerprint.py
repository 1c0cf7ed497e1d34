"""Fingerprints of model directories, which tell whether adapters belong to a base model."""

import hashlib
from pathlib import Path

from hybridflow.checkpoint.store import Checkpoint
from hybridflow.errors import CheckpointConfigError

_SAMPLED_BYTES, _NUM_SAMPLES = 1 << 20, 64


def model_fingerprint(directory: str | Path) -> str:
    """Hash the config.json and weights of a model directory to 32 hexadecimal digits, independent of its path.

    Only 64 samples of 1 MiB are read from a large file, which is enough to tell two models apart.
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
    """Raise CheckpointError if the checkpoint's run started from a model other than the one in `model_dir`.

    Adapters load into any model of the same shapes, but are meaningless on a different base.
    """
    recorded = checkpoint.info.get("models", {}).get("model.path")
    if recorded is not None and recorded != model_fingerprint(model_dir):
        path = checkpoint.info.get("config", {}).get("model.path")
        named = f", '{path}'" if path else ""
        raise CheckpointConfigError(
            f"the adapters of '{checkpoint.directory}' were trained on a different base model than '{model_dir}'; "
            f"give the directory that training started from{named}."
        )
