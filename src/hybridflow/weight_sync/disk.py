"""Weights through files that both sides see: a safetensors file for each bucket, removed after the sync."""

import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hybridflow.config import Config
from hybridflow.errors import WeightSyncError
from hybridflow.weight_sync.base import Sent, WeightTransport
from hybridflow.weight_sync.buckets import Bucket


def sync_directory(config: Config) -> Path:
    """Where the buckets of a run are while they are under way."""
    return Path(config.trainer.run_dir) / "weight_sync"


class Disk(WeightTransport):
    """`sync_directory` is the sender's own; it is removed when all buckets are received."""

    def __init__(self, config: Config) -> None:
        self._directory = sync_directory(config)
        self._num_sent = 0

    def send(self, bucket: Bucket) -> Sent:
        path = self._directory / f"bucket_{self._num_sent:05d}.safetensors"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.cpu().contiguous() for name, tensor in bucket.weights.items()}, path)
        except (OSError, SafetensorError) as error:
            self.finish()  # what was written would keep a full disk full
            raise WeightSyncError(f"weights could not be written to '{path}': {error}") from error
        self._num_sent += 1
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, str(path))

    def receive(self, sent: Sent) -> Bucket:
        try:
            stored = load_file(sent.contents)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"weights could not be read from '{sent.contents}': {error}. The rollout processes must see the "
                "trainer's directory; use another rollout.weight_sync where they do not."
            ) from error
        weights = {spec.name: stored[spec.name] for spec in sent.specs if spec.name in stored}
        return Bucket(weights, sent.fingerprints, sent.version)

    def finish(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self._num_sent = 0
