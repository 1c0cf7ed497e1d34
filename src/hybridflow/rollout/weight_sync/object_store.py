"""The `object_store` transport: shared memory on one node, Ray's object transfer between nodes."""

import torch

from hybridflow.config import Config
from hybridflow.rollout.weight_sync.base import Sent, WeightTransport
from hybridflow.rollout.weight_sync.buckets import Bucket, pack, packed_size, unpack


class ObjectStore(WeightTransport):
    """Buckets packed in host memory and passed inside `Sent`; the store frees them after the call that carries them."""

    def __init__(self, config: Config) -> None:
        """Build one end; `config` is not used."""

    def send(self, bucket: Bucket) -> Sent:
        """Pack a bucket into host memory."""
        contents = torch.empty(packed_size(bucket.specs), dtype=torch.uint8)
        pack(bucket, contents)
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, contents)

    def receive(self, sent: Sent) -> Bucket:
        """Return the bucket, as views of the packed memory."""
        return Bucket(unpack(sent.specs, sent.contents), sent.fingerprints, sent.version)
