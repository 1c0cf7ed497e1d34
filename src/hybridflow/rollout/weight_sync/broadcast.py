"""The `broadcast` transport: a separate process group of gloo, or of NCCL on GPUs."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from hybridflow.config import Config
from hybridflow.errors import LostWeightSyncError
from hybridflow.rollout.weight_sync.base import Sent, WeightTransport
from hybridflow.rollout.weight_sync.buckets import Bucket, pack, packed_size, unpack
from hybridflow.runtime.device import own_device
from hybridflow.runtime.rendezvous import new_store_name, open_store


class Broadcast(WeightTransport):
    """A broadcast from the sender; the announcement names the store through which the ranks find each other."""

    def __init__(self, config: Config) -> None:
        self._timeout = timedelta(seconds=config.controller.call_timeout_s or 10**8)
        self._device = own_device()
        self._group: Any = None
        self._in_flight: list[tuple[Any, Tensor]] = []

    def new_store(self) -> str:
        """Return the name of a new store."""
        return new_store_name()

    def join(self, store: str, rank: int, world_size: int) -> None:
        """Connect all ranks. Raises LostWeightSyncError if the others do not join within the call timeout."""
        if self._group is not None:
            return
        try:
            self._group = _build_group(self._device, open_store(store), rank, world_size, self._timeout)
            # The first collective of NCCL waits for all ranks, but the receivers start after the sender's first send.
            self._start(torch.zeros(1, dtype=torch.uint8, device=self._device)).wait()
        except RuntimeError as error:
            raise LostWeightSyncError(
                f"rank {rank} of {world_size} could not connect to the other ranks for the weight sync: {error}"
            ) from error

    def send(self, bucket: Bucket) -> Sent:
        """Start the broadcast of a bucket; at most two are in flight."""
        packed = torch.empty(packed_size(bucket.specs), dtype=torch.uint8, device=self._device)
        pack(bucket, packed)
        self._wait(keep=1)
        self._in_flight.append((self._start(packed), packed))
        return Sent(bucket.specs, bucket.fingerprints, bucket.version)

    def receive(self, sent: Sent) -> Bucket:
        """Take part in the broadcast of a bucket, and return it."""
        packed = torch.empty(packed_size(sent.specs), dtype=torch.uint8, device=self._device)
        self._in_flight.append((self._start(packed), packed))
        self._wait(keep=0)
        return Bucket(unpack(sent.specs, packed), sent.fingerprints, sent.version)

    def finish(self) -> None:
        """Wait until all broadcasts are complete. Raises LostWeightSyncError if one fails."""
        self._wait(keep=0)

    def _start(self, packed: Tensor) -> Any:
        return self._group.broadcast([packed], dist.BroadcastOptions())  # rootRank is 0

    def _wait(self, keep: int) -> None:
        """Wait until at most `keep` broadcasts are in flight."""
        while len(self._in_flight) > keep:
            work, _ = self._in_flight.pop(0)
            try:
                work.wait()
            except RuntimeError as error:
                raise LostWeightSyncError(f"the broadcast of a weight bucket failed: {error}") from error


def _build_group(device: torch.device, store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    if device.type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)
