"""Trainer and rollout engine in one process: the engine is given the gathered tensors themselves."""

from hybridflow.weight_sync.base import Sent, WeightTransport
from hybridflow.weight_sync.buckets import Bucket
from hybridflow.weight_sync.receiver import WeightReceiver
from hybridflow.weight_sync.sender import WeightSender


class InProcess(WeightTransport):
    """Nothing is copied."""

    def send(self, bucket: Bucket) -> Sent:
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, bucket.weights)

    def receive(self, sent: Sent) -> Bucket:
        return Bucket(sent.contents, sent.fingerprints, sent.version)


def hand_over(sender: WeightSender, receiver: WeightReceiver) -> int:
    """Load the sender's weights into the receiver's engine; `receiver.check` is to follow. Returns their bytes."""
    announced = sender.announce()
    receiver.start(announced)
    try:
        for _ in range(announced.num_buckets):
            receiver.receive(sender.send())
    finally:
        sender.finish()
    receiver.finish()
    return announced.num_bytes
