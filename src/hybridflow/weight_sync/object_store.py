"""Weights through the backend's object store: shared memory on one node, Ray's transfer between nodes."""

import torch

from hybridflow.config import Config
from hybridflow.weight_sync.base import Sent, WeightTransport
from hybridflow.weight_sync.buckets import Bucket, pack, packed_size, unpack


class ObjectStore(WeightTransport):
    """`Sent` carries the contents, packed in host memory; the store frees them when the call that has them is over."""

    def __init__(self, config: Config) -> None:
        """Build one end; there is nothing to configure."""

    def send(self, bucket: Bucket) -> Sent:
        contents = torch.empty(packed_size(bucket.specs), dtype=torch.uint8)
        pack(bucket, contents)
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, contents)

    def receive(self, sent: Sent) -> Bucket:
        return Bucket(unpack(sent.specs, sent.contents), sent.fingerprints, sent.version)
