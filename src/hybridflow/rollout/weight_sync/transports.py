"""The transports between two pools, by their name in `rollout.weight_sync`."""

import shutil
from collections.abc import Callable, Mapping

from hybridflow.config import Config
from hybridflow.rollout.weight_sync.base import WeightTransport
from hybridflow.rollout.weight_sync.broadcast import Broadcast
from hybridflow.rollout.weight_sync.disk import Disk, sync_directory
from hybridflow.rollout.weight_sync.ipc import Ipc
from hybridflow.rollout.weight_sync.object_store import ObjectStore

TRANSPORTS: Mapping[str, Callable[[Config], WeightTransport]] = {
    "object_store": ObjectStore,
    "broadcast": Broadcast,
    "disk": Disk,
    "ipc": Ipc,
}


def build_transport(config: Config) -> WeightTransport:
    """Build one end of the configured transport.

    A replay in one process uses the object store: its two sides could not wait for each other.
    """
    in_one_process = config.rollout.replay and config.controller.backend == "local"
    return TRANSPORTS["object_store" if in_one_process else config.rollout.weight_sync](config)


def build_sending_transport(config: Config) -> WeightTransport:
    """Build the sender's end, and remove buckets that a killed run left on the disk."""
    shutil.rmtree(sync_directory(config), ignore_errors=True)
    return build_transport(config)
