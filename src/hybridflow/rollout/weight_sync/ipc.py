"""The `ipc` transport: memory shared between processes of one node, of the host or of the GPU that both use."""

import os
import socket
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.config import Config
from hybridflow.errors import ConfigError, LostWeightSyncError, WeightSyncError
from hybridflow.rollout.weight_sync.base import IN_FLIGHT, Sent, WeightTransport
from hybridflow.rollout.weight_sync.buckets import Bucket, pack, packed_size, unpack
from hybridflow.rollout.weight_sync.shared_memory import (
    GpuHandle,
    HostHandle,
    SharedHostMemory,
    copy_gpu_memory,
    map_host_memory,
    require_shareable_memory,
    share_gpu_memory,
)
from hybridflow.runtime.device import own_device
from hybridflow.runtime.process_address import ProcessAddress, own_address
from hybridflow.runtime.process_report import has_exited
from hybridflow.runtime.rendezvous import new_store_name


@dataclass(frozen=True)
class Shared:
    """A bucket in shared memory, the node's name for error messages, and a handle for each receiver in order.

    `sender`: the process that owns the memory.
    """

    host: str
    handles: tuple[HostHandle | GpuHandle, ...]
    sender: ProcessAddress | None = None


class Ipc(WeightTransport):
    """Buckets packed in the sender's memory, which receivers on the same node map.

    On a CPU a receiver reads the sender's pages; on a GPU it copies the bucket within the GPU.
    """

    def __init__(self, config: Config) -> None:
        """Build one end; `config` is not used.

        Raises ConfigError without the system calls of Linux, or on a GPU whose memory cannot be shared.
        """
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "rollout.weight_sync='ipc' needs Linux (memfd_create); use rollout.weight_sync = 'object_store'."
            )
        self._device = own_device()
        if self._device.type == "cuda":
            require_shareable_memory()
        self._rank, self._num_receivers = 0, 1
        self._sent: deque[SharedHostMemory | Tensor] = deque()

    def new_store(self) -> str:
        """Return a new name, so that the receivers of a new sender join it."""
        return new_store_name()

    def join(self, store: str, rank: int, world_size: int) -> None:
        """Set the rank of this end, 0 for the sender, and the number of receivers."""
        self._rank, self._num_receivers = rank, world_size - 1

    def send(self, bucket: Bucket) -> Sent:
        """Pack a bucket into shared memory, and release the memory of buckets that were received."""
        while len(self._sent) > IN_FLIGHT:
            self._release_oldest()
        size = packed_size(bucket.specs)
        if self._device.type == "cuda":
            packed = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._sent.append(packed)
            pack(bucket, packed)
            handles = tuple(share_gpu_memory(packed) for _ in range(self._num_receivers))
        else:
            memory = SharedHostMemory(size)
            self._sent.append(memory)
            pack(bucket, memory.tensor)
            handles = (memory.handle,) * self._num_receivers
        shared = Shared(socket.gethostname(), handles, own_address())
        return Sent(bucket.specs, bucket.fingerprints, bucket.version, shared)

    def receive(self, sent: Sent) -> Bucket:
        """Return the bucket.

        Raises WeightSyncError if the sender is on another node or another GPU, LostWeightSyncError if it has exited.
        """
        shared: Shared = sent.contents
        try:
            packed = self._map(shared)
        except WeightSyncError as error:
            if shared.sender is not None and has_exited(shared.sender):
                raise LostWeightSyncError(
                    f"process {shared.sender.pid}, the trainer's rank 0, exited before this rollout engine had read "
                    f"its weights: {error.__cause__ or error}"
                ) from None
            raise
        return Bucket(unpack(sent.specs, packed), sent.fingerprints, sent.version)

    def _map(self, shared: Shared) -> Tensor:
        """Return the packed bucket of this receiver."""
        handle = shared.handles[max(0, self._rank - 1)]
        if isinstance(handle, GpuHandle):
            return copy_gpu_memory(handle, self._device)
        try:
            return map_host_memory(handle)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"rollout.weight_sync='ipc' needs the trainer's rank 0, on host {shared.host}, and all rollout "
                f"engines, here on host {socket.gethostname()}, on one node and under one user: {error}; use "
                "rollout.weight_sync = 'object_store', or 'broadcast' with GPUs."
            ) from error

    def finish(self) -> None:
        """Release the memory of all buckets."""
        while self._sent:
            self._release_oldest()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _release_oldest(self) -> None:
        memory = self._sent.popleft()
        if isinstance(memory, SharedHostMemory):
            memory.close()
