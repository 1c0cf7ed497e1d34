"""The two ends of the way that `rollout.weight_sync` names, between the pool that learns and the one that generates."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config import Config
from hybridflow.runtime import own_device
from hybridflow.weight_sync import Bucket, ByBroadcast, Sent, ThroughDisk, ThroughObjectStore, WeightSpec, WeightWay

SYNC_DIRECTORY = "weight_sync"
"""In the run's directory: where buckets on their way through the disk are."""


@dataclass(frozen=True)
class Offer:
    """What a trainer will send: tensors in so many buckets, of a version; and where it listens, if it does."""

    specs: Sequence[WeightSpec]
    num_buckets: int
    version: int
    address: str = ""
    port: int = 0


class SendingEnd:
    """That of rank 0 of the trainer; other ranks have one that is not used."""

    def __init__(self, config: Config, rank: int, num_receivers: int) -> None:
        self.address, self.port = "", 0
        self._broadcast: ByBroadcast | None = None
        self._way: WeightWay
        directory = Path(config.trainer.run_dir) / SYNC_DIRECTORY
        if rank == 0:
            shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed
        if config.rollout.weight_sync == "disk":
            self._way = ThroughDisk(directory)
        elif config.rollout.weight_sync == "broadcast" and rank == 0:
            self._way = self._broadcast = ByBroadcast(
                0,
                num_receivers + 1,
                os.environ.get("MASTER_ADDR", "127.0.0.1"),
                device=own_device(),
                timeout_s=config.controller.call_timeout_s,
            )
            self.address, self.port = self._broadcast.address, self._broadcast.port
        else:
            self._way = ThroughObjectStore()

    def join(self) -> None:
        """Meet the receivers, where they meet."""
        if self._broadcast is not None:
            self._broadcast.join()

    def send(self, bucket: Bucket) -> Sent:
        """Start a bucket on its way."""
        return self._way.send(bucket)

    def finish(self) -> None:
        """Wait until it has been received, and clear away what it left."""
        self._way.finish()


def receiving_end(config: Config, rank: int, world_size: int, offer: Offer) -> WeightWay:
    """That of a rank of the pool that generates; by broadcast it meets the sender here."""
    if config.rollout.weight_sync == "disk":
        return ThroughDisk(Path(config.trainer.run_dir) / SYNC_DIRECTORY)
    if config.rollout.weight_sync == "broadcast":
        way = ByBroadcast(
            rank + 1,
            world_size + 1,
            offer.address,
            offer.port,
            device=own_device(),
            timeout_s=config.controller.call_timeout_s,
        )
        way.join()
        return way
    return ThroughObjectStore()
