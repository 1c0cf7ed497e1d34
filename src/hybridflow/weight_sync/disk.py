"""Through files that both sides see: safetensors in a directory, one for each bucket, gone when they are read."""

import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hybridflow.errors import WeightSyncError
from hybridflow.weight_sync.buckets import Bucket
from hybridflow.weight_sync.ways import Sent


class ThroughDisk:
    """`directory` is the sender's own, and removed when all is received."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
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
