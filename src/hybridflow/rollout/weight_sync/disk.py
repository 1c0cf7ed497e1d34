"""The `disk` transport: one safetensors file per bucket on a shared file system, removed after the sync."""

import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hybridflow.config import Config
from hybridflow.errors import WeightSyncError
from hybridflow.rollout.weight_sync.base import Sent, WeightTransport
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.runtime.plain_files import require_plain_file


def sync_directory(config: Config) -> Path:
    """Return the directory of a run for buckets in transit."""
    return Path(config.trainer.run_dir) / "weight_sync"


class Disk(WeightTransport):
    """Files in `sync_directory`, which only the sender writes; it is removed when all buckets are received."""

    def __init__(self, config: Config) -> None:
        self._directory = sync_directory(config)
        self._num_sent = 0

    def send(self, bucket: Bucket) -> Sent:
        """Write a bucket to a file. Raises WeightSyncError, with all buckets removed, if it cannot be written."""
        path = self._directory / f"bucket_{self._num_sent:05d}.safetensors"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            require_plain_file(path)
            save_file({name: tensor.cpu().contiguous() for name, tensor in bucket.weights.items()}, path)
        except (OSError, SafetensorError) as error:
            self.finish()  # to free a full disk
            raise WeightSyncError(f"weights could not be written to '{path}': {error}") from error
        self._num_sent += 1
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, str(path))

    def receive(self, sent: Sent) -> Bucket:
        """Read a bucket from its file. Raises WeightSyncError if it cannot be read."""
        try:
            stored = load_file(sent.contents)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(
                f"weights could not be read from '{sent.contents}': {error}. The rollout processes must have access to "
                "the trainer's directory; if they do not, use another rollout.weight_sync."
            ) from error
        weights = {spec.name: stored[spec.name] for spec in sent.specs if spec.name in stored}
        return Bucket(weights, sent.fingerprints, sent.version)

    def finish(self) -> None:
        """Remove the files of all buckets."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._num_sent = 0
