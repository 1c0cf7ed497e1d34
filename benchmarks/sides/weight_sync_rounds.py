"""The two timed operations of a colocated weight sync: one copy of the weights, and our part of the sync."""

import time

from support.weight_workers import GivenWeights, NoEngine
from torch import Tensor

from hybridflow.config import Config, RolloutConfig
from hybridflow.rollout.weight_sync.in_process import InProcess, hand_over
from hybridflow.rollout.weight_sync.receiver import WeightReceiver
from hybridflow.rollout.weight_sync.sender import WeightSender

BUCKET_BYTES = 256 * 2**20


def copy_once(weights: dict[str, Tensor], copies: dict[str, Tensor]) -> float:
    """Return the seconds to copy all weights into memory that is already allocated."""
    start = time.perf_counter()
    for name, tensor in weights.items():
        copies[name].copy_(tensor)
    return time.perf_counter() - start


def our_part(weights: dict[str, Tensor]) -> float:
    """Return the seconds of a colocated sync without the engine: plan, buckets, a fingerprint on both sides."""
    config = Config(rollout=RolloutConfig(sync_bucket_bytes=BUCKET_BYTES))
    start = time.perf_counter()
    sender = WeightSender(GivenWeights(weights), config, InProcess)
    receiver = WeightReceiver(NoEngine(), "float32", InProcess())
    hand_over(sender, receiver)
    receiver.check(sender.compute_probe())
    return time.perf_counter() - start
