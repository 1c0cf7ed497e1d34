"""The two things that a colocated sync is compared by, each timed once."""

import time

from support.weight_workers import NoEngine
from torch import Tensor

from hybridflow.weight_sync import CheckedReceiver, InProcess, Probe, fill_buckets, plan_buckets, spec_of

BUCKET_BYTES = 256 * 2**20


def copy_once(weights: dict[str, Tensor], copies: dict[str, Tensor]) -> float:
    """Seconds to copy all weights into memory that is there."""
    start = time.perf_counter()
    for name, tensor in weights.items():
        copies[name].copy_(tensor)
    return time.perf_counter() - start


def our_part(weights: dict[str, Tensor]) -> float:
    """Seconds of a colocated sync without the engine: plan, buckets, a fingerprint on either side."""
    start = time.perf_counter()
    receiver, way = CheckedReceiver(NoEngine(), "float32"), InProcess()
    specs = [spec_of(name, tensor) for name, tensor in weights.items()]
    receiver.start(specs, 1)
    for bucket in fill_buckets(plan_buckets(specs, BUCKET_BYTES), weights.items(), 1):
        receiver.accept(way.receive(way.send(bucket)))
    receiver.finish()
    receiver.check(Probe([[0, 0]], [[0.0]]))
    return time.perf_counter() - start
