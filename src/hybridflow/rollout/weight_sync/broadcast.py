"""The `broadcast` transport: a separate process group of gloo, or of NCCL on GPUs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""The variable that a group of NCCL reads when it is made.

If it is "1", the wait for a broadcast ends when the GPU has done it. If a rank is lost or the timeout passes, the wait
aborts the communicator, which ends the kernel, and raises an error. There is no watchdog thread, which would end the
process a minute later.
"""

_LEFT: list[Any] = []
"""Groups that were left. Those of gloo live as long as the process: destroying one waits for its broadcasts, and
corrupts memory if other ranks destroy theirs at the same time."""


class Broadcast(WeightTransport):
    """A broadcast from the sender; the announcement names the store through which the ranks find each other."""

    def __init__(self, config: Config) -> None:
        self._timeout = timedelta(seconds=config.controller.call_timeout_s or 10**8)
        self._device = own_device()
        self._group: Any = None
        self._store = ""
        self._in_flight: list[tuple[Any, Tensor]] = []

    def new_store(self) -> str:
        """Return the name of a new store."""
        return new_store_name()

    def join(self, store: str, rank: int, world_size: int) -> None:
        """Connect all ranks through a store, and leave the group of another store.

        Raises LostWeightSyncError if the others do not join within the call timeout.
        """
        if self._group is not None and store == self._store:
            return
        self.close()
        self._store = store
        ranks = f"rank {rank} of {world_size} could not connect to the other ranks"
        with self._leaving_on_error(f"{ranks} for the weight sync"):
            self._group = _build_group(self._device, open_store(store), rank, world_size, self._timeout)
            # The first collective of NCCL waits for all ranks, but the receivers start after the sender's first send.
            first = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._group.broadcast([first], dist.BroadcastOptions()).wait()

    def send(self, bucket: Bucket) -> Sent:
        """Start the broadcast of a bucket; at most two are in flight."""
        packed = torch.empty(packed_size(bucket.specs), dtype=torch.uint8, device=self._device)
        pack(bucket, packed)
        self._wait(keep=1)
        self._start(packed)
        return Sent(bucket.specs, bucket.fingerprints, bucket.version)

    def receive(self, sent: Sent) -> Bucket:
        """Take part in the broadcast of a bucket, and return it."""
        packed = torch.empty(packed_size(sent.specs), dtype=torch.uint8, device=self._device)
        self._start(packed)
        self._wait(keep=0)
        return Bucket(unpack(sent.specs, packed), sent.fingerprints, sent.version)

    def finish(self) -> None:
        """Wait until all broadcasts are complete. Raises LostWeightSyncError if one fails."""
        self._wait(keep=0)

    def close(self) -> None:
        """Leave the group; broadcasts under way are lost, and later ones need a new `join`."""
        group, self._group = self._group, None
        self._in_flight.clear()
        if group is not None:
            group.abort()  # ends the kernels of NCCL; that of gloo does nothing
            _LEFT.append(group)

    def _start(self, packed: Tensor) -> None:
        if self._group is None:
            raise LostWeightSyncError(
                "the ranks of the weight sync are not connected, because an earlier sync failed; restart the workers "
                "from the last checkpoint."
            )
        with self._leaving_on_error("a weight bucket could not be broadcast"):
            self._in_flight.append((self._group.broadcast([packed], dist.BroadcastOptions()), packed))  # from rank 0

    def _wait(self, keep: int) -> None:
        """Wait until at most `keep` broadcasts are in flight."""
        while len(self._in_flight) > keep:
            work, _ = self._in_flight.pop(0)
            with self._leaving_on_error("the broadcast of a weight bucket failed"):
                work.wait()

    @contextmanager
    def _leaving_on_error(self, what: str) -> Iterator[None]:
        """Raise an error of the group as LostWeightSyncError, and leave the group."""
        try:
            yield
        except RuntimeError as error:
            self.close()
            raise LostWeightSyncError(f"{what}: {error}") from error


def _build_group(device: torch.device, store: Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    if device.type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        given = os.environ.get(BLOCKING_WAIT)
        os.environ[BLOCKING_WAIT] = "1"  # for this group alone: those of training wait on the GPU
        try:
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
        finally:
            os.environ.pop(BLOCKING_WAIT)
            if given is not None:
                os.environ[BLOCKING_WAIT] = given
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)
