"""The ways a bucket goes from a trainer to rollout engines: one Protocol, four implementations beside this file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybridflow.weight_sync.buckets import Bucket, WeightSpec


@dataclass(frozen=True)
class Sent:
    """What the sender tells of a bucket: what is in it, and how to come by the contents, by the way it goes."""

    specs: Sequence[WeightSpec]
    fingerprints: dict[str, int]
    version: int
    contents: Any = None

    def apart(self) -> tuple["Sent", Any]:
        """The description without the contents, and those beside it: a tensor that is no part of an object travels
        without being copied into a message."""
        return replace(self, contents=None), self.contents

    @staticmethod
    def joined(apart: tuple["Sent", Any]) -> "Sent":
        """What was taken apart."""
        described, contents = apart
        return replace(described, contents=contents)


class WeightWay(Protocol):
    """One end of a way. Buckets are received in the order in which they are sent."""

    def send(self, bucket: Bucket) -> Sent:
        """Start it on its way; what comes back is handed to `receive` of every receiver."""
        ...

    def receive(self, sent: Sent) -> Bucket:
        """The bucket, whose memory belongs to the receiver and is not used again."""
        ...

    def finish(self) -> None:
        """Wait until what was sent is received, and clear away what it left."""
        ...
