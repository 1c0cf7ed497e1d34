"""`WeightTransport`, the Protocol that moves buckets of weights to rollout engines, and the messages of a sync.

To add a transport, add a file beside this one and a line in `transports.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridflow.rollout.weight_sync.buckets import Bucket, WeightSpec

IN_FLIGHT = 2
"""Buckets that may be sent and not yet received when the next one is gathered."""


@dataclass(frozen=True)
class Announcement:
    """The weights of a version, in `num_buckets` buckets, and the name of the ranks' `store`, if they connect."""

    specs: Sequence[WeightSpec]
    num_buckets: int
    version: int
    store: str = ""

    @property
    def num_bytes(self) -> int:
        """The size of all weights in bytes."""
        return sum(spec.num_bytes for spec in self.specs)


@dataclass(frozen=True)
class Sent:
    """A sent bucket: the specs of its tensors, and `contents`, by which the receiver's transport reads them."""

    specs: Sequence[WeightSpec]
    fingerprints: dict[str, int]
    version: int
    contents: Any = None

    def apart(self) -> tuple["Sent", Any]:
        """Return the description without contents, and the contents: a bare tensor is not copied into a message."""
        return replace(self, contents=None), self.contents

    @staticmethod
    def joined(apart: tuple["Sent", Any]) -> "Sent":
        """Join the description and the contents that `apart` returned."""
        described, contents = apart
        return replace(described, contents=contents)


class WeightTransport(Protocol):
    """One end of a transport.

    Buckets are received in the order in which they are sent. When one is sent, all but the last `IN_FLIGHT` before it
    have been received and loaded.
    """

    def new_store(self) -> str:
        """Return the name of a store through which the sender and the receivers connect; "" if they need none."""
        return ""

    def join(self, store: str, rank: int, world_size: int) -> None:
        """Connect the sender, rank 0, and all receivers, which call this at the same time.

        Later calls do nothing, unless they name another store: the ranks then connect anew.
        """

    def send(self, bucket: Bucket) -> Sent:
        """Start to send a bucket, and return the message for each receiver's `receive`."""
        ...

    def receive(self, sent: Sent) -> Bucket:
        """Return the bucket, in memory that belongs to the receiver and is not reused."""
        ...

    def finish(self) -> None:
        """Wait until all buckets are received, and release the memory or files used to send them."""

    def close(self) -> None:
        """Disconnect, whatever is under way; the end is not used again."""
