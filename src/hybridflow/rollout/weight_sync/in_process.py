"""Weight sync inside one process: the rollout engine loads the gathered tensors or slices without a copy."""

from hybridflow.rollout.weight_sync.base import Sent, WeightTransport
from hybridflow.rollout.weight_sync.buckets import Bucket
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender


class InProcess(WeightTransport):
    """A transport inside one process, which passes tensors without copying them."""

    def send(self, bucket: Bucket) -> Sent:
        """Return the bucket's tensors as contents."""
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, bucket.weights)

    def receive(self, sent: Sent) -> Bucket:
        """Return the bucket with the sender's tensors."""
        return Bucket(sent.contents, sent.fingerprints, sent.version)


def hand_over(sender: WeightSender, receiver: WeightReceiver) -> int:
    """Load the sender's weights into the receiver's engine, and return their size in bytes.

    The caller calls `receiver.check` afterwards.
    """
    announced = sender.announce()
    receiver.start(announced)
    try:
        for _ in range(announced.num_buckets):
            receiver.receive(sender.send())
    finally:
        sender.finish()
    receiver.finish()
    return announced.num_bytes
