"""By a collective of its own group: the sender is rank 0, every receiver one rank more. gloo, or NCCL on GPUs."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from hybridflow.errors import LostWeightSyncError
from hybridflow.runtime import listen
from hybridflow.weight_sync.buckets import Bucket, pack, packed_size, unpack
from hybridflow.weight_sync.ways import Sent

SENDER = 0


class ByBroadcast:
    """A group beside the process's other ones. `rank` 0 listens at `address`, on a free port unless one is given."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        port: int = 0,
        *,
        device: torch.device,
        timeout_s: float | None = None,
    ) -> None:
        timeout = timedelta(seconds=timeout_s or 10**8)
        self._rank, self._world_size, self._device, self._timeout = rank, world_size, device, timeout
        self._listening = listen(address, port) if rank == SENDER else None
        self.address, self.port = address, self._listening.getsockname()[1] if self._listening else port
        self._group: Any = None
        self._under_way: list[tuple[Any, Tensor]] = []

    def join(self) -> None:
        """Meet the others. Raises WeightSyncError if they do not come in time."""
        if self._group is not None:
            return
        listening = self._listening.detach() if self._listening else None
        try:
            store = TCPStore(
                self.address, self.port, self._world_size, self._rank == SENDER, self._timeout, False,
                master_listen_fd=listening,
            )  # fmt: skip
            self._group = _group_of(self._device, store, self._rank, self._world_size, self._timeout)
        except RuntimeError as error:
            raise LostWeightSyncError(
                f"rank {self._rank} of {self._world_size} could not meet the others at {self.address}:{self.port} to "
                f"exchange weights: {error}"
            ) from error

    def send(self, bucket: Bucket) -> Sent:
        self.join()
        packed = torch.empty(packed_size(bucket.specs), dtype=torch.uint8, device=self._device)
        pack(bucket, packed)
        self._wait(keep=1)
        self._under_way.append((self._start(packed), packed))
        return Sent(bucket.specs, bucket.fingerprints, bucket.version)

    def receive(self, sent: Sent) -> Bucket:
        self.join()
        packed = torch.empty(packed_size(sent.specs), dtype=torch.uint8, device=self._device)
        self._under_way.append((self._start(packed), packed))
        self._wait(keep=0)
        return Bucket(unpack(sent.specs, packed), sent.fingerprints, sent.version)

    def finish(self) -> None:
        self._wait(keep=0)

    def _start(self, packed: Tensor) -> Any:
        return self._group.broadcast([packed], dist.BroadcastOptions())  # rootRank is 0

    def _wait(self, keep: int) -> None:
        """Until at most `keep` broadcasts are under way."""
        while len(self._under_way) > keep:
            work, _ = self._under_way.pop(0)
            try:
                work.wait()
            except RuntimeError as error:
                raise LostWeightSyncError(f"a broadcast of weights failed: {error}") from error


def _group_of(device: torch.device, store: TCPStore, rank: int, world_size: int, timeout: timedelta) -> Any:
    if device.type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)
