"""Through the backend's object store: on one node that is shared memory, between nodes Ray's transfer."""

import torch

from hybridflow.weight_sync.buckets import Bucket, pack, packed_size, unpack
from hybridflow.weight_sync.ways import Sent


class ThroughObjectStore:
    """`Sent` itself carries the contents, in one piece in the host's memory."""

    def send(self, bucket: Bucket) -> Sent:
        contents = torch.empty(packed_size(bucket.specs), dtype=torch.uint8)
        pack(bucket, contents)
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, contents)

    def receive(self, sent: Sent) -> Bucket:
        return Bucket(unpack(sent.specs, sent.contents), sent.fingerprints, sent.version)

    def finish(self) -> None:
        """The store lets go of what nobody refers to."""
