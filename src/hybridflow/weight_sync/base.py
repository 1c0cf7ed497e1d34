"""`WeightTransport`, which carries buckets of weights from a trainer to rollout engines, and the messages of a sync.

An implementation is a file beside this one and a line in `transports.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridflow.weight_sync.buckets import Bucket, WeightSpec


@dataclass(frozen=True)
class Announcement:
    """The weights of a version, in `num_buckets` buckets; `address` is where the sender listens, "" if it does not."""

    specs: Sequence[WeightSpec]
    num_buckets: int
    version: int
    address: str = ""

    @property
    def num_bytes(self) -> int:
        """The size of all weights."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True)
class Sent:
    """A bucket that was sent: what is in it, and what a receiver's transport needs to read the contents."""

    specs: Sequence[WeightSpec]
    fingerprints: dict[str, int]
    version: int
    contents: Any = None

    def apart(self) -> tuple["Sent", Any]:
        """The description, and the contents beside it: a tensor outside an object is not copied into a message."""
        return replace(self, contents=None), self.contents

    @staticmethod
    def joined(apart: tuple["Sent", Any]) -> "Sent":
        """Join what `apart` returned."""
        described, contents = apart
        return replace(described, contents=contents)


class WeightTransport(Protocol):
    """One end of a transport. Buckets are received in the order in which they are sent."""

    def listen(self) -> str:
        """Return the address at which the sender waits for receivers, "" if it does not."""
        return ""

    def join(self, address: str, rank: int, world_size: int) -> None:
        """Connect both ends, all at the same time; the sender is rank 0. Later calls do nothing."""

    def send(self, bucket: Bucket) -> Sent:
        """Start to send a bucket; every receiver's `receive` takes what is returned."""
        ...

    def receive(self, sent: Sent) -> Bucket:
        """Return the bucket. Its memory belongs to the receiver and is not used again."""
        ...

    def finish(self) -> None:
        """Wait until all buckets are received, and remove what sending them left."""
