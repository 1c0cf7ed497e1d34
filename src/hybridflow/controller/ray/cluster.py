"""The connection to a Ray cluster: a running one, or a local one that is started and stopped by the connection."""

import math
import os
import socket
from collections import Counter
from collections.abc import Sequence

import ray
import torch

from hybridflow.controller.ray.liveness.cluster_watch import ClusterWatch
from hybridflow.controller.ray.local_cluster import LocalCluster, while_ray_starts
from hybridflow.controller.ray.nodes import EPSILON
from hybridflow.controller.ray.resource_pool import RayResourcePool
from hybridflow.errors import ConfigError
from hybridflow.runtime.device import gpu_has_bfloat16, require_visible_devices
from hybridflow.runtime.observe import get_logger

CONNECT_TIMEOUT_S = 5.0

KIND = "accelerator_type:"
"""Prefix of the resource by which Ray reports the kind of a node's GPUs."""
KINDS_WITHOUT_BFLOAT16 = ("K80", "P4", "P100", "T4", "V100")
"""The kinds that Ray names whose compute capability is below 8.0."""

logger = get_logger(__name__)


class Connection:
    """A connection of this process to a Ray cluster; the arguments are those of `RayBackend`."""

    def __init__(self, address: str, num_cpus: float, num_gpus: int, object_store_bytes: int | None) -> None:
        if address.startswith("ray://"):
            raise ConfigError(
                f"address={address!r} is a Ray Client address, which is not supported: data would be sent twice, and "
                f"the object store could not be shared; run the program on a node of the cluster (`ray job submit`, or "
                f"log in there) with address='auto' or the address of its head node, "
                f"'{address.removeprefix('ray://').partition(':')[0]}:6379'."
            )
        self._address, self._num_cpus, self._num_gpus = address, num_cpus, num_gpus
        self._object_store_bytes = object_store_bytes
        self._local: LocalCluster | None = None
        self._is_ours = False
        self._watch: ClusterWatch | None = None

    def open(self, pools: Sequence[RayResourcePool]) -> None:
        """Connect unless this process is connected. Raises ConfigError, within seconds, if no cluster answers."""
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # each error is raised where its result is read
        if not ray.is_initialized():
            self._connect(pools)
        if self._watch is None or not self._watch.is_current:
            self._watch = ClusterWatch(is_local=self._local is not None)

    def _connect(self, pools: Sequence[RayResourcePool]) -> None:
        if self._address:
            _require_reachable(self._address)
            try:
                with while_ray_starts():
                    ray.init(self._address, log_to_driver=True, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"no Ray cluster answers at address={self._address!r} ({error}); start one with "
                    f"`ray start --head`, or leave the address empty to start a local cluster with the run."
                ) from error
            self._is_ours = True
            return
        processes, cores = sum(pool.world_size for pool in pools), os.cpu_count() or 1
        if processes > cores:
            logger.warning(
                "%d worker processes share the %d CPU cores of this machine and slow each other down", processes, cores
            )
        num_cpus = self._num_cpus or max(1.0, sum(pool.share["CPU"] * pool.world_size for pool in pools))
        # A cluster with more GPUs than the machine would give ranks devices that do not exist.
        if self._num_gpus > (count := torch.cuda.device_count()):
            raise ConfigError(
                f"num_gpus={self._num_gpus} is invalid for a local cluster: this machine has {count} GPUs that PyTorch "
                f"finds (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); use at most {count}, or "
                "leave num_gpus out for as many as the pools need."
            )
        num_gpus = self._num_gpus or min(gpus_for(pools), count)
        self._local = LocalCluster(num_cpus, num_gpus, self._object_store_bytes)
        self._local.start()

    def has_gpus(self) -> bool:
        """Return whether the cluster has GPUs; for a local cluster that is not started, whether this machine has.

        Connects to a running cluster. Raises ConfigError if CUDA_VISIBLE_DEVICES names GPUs that are not there.
        """
        if not self._address and not ray.is_initialized():
            require_visible_devices()
            return bool(self._num_gpus or torch.cuda.device_count())
        self.open([])
        return ray.cluster_resources().get("GPU", 0) > 0

    def gpus_have_bfloat16(self) -> bool | None:
        """Return whether all GPUs compute in bfloat16, by their kinds as Ray reports them; None without GPUs."""
        if not self.has_gpus():
            return None
        if not ray.is_initialized():  # the GPUs of this machine
            return gpu_has_bfloat16()
        return not any(f"{KIND}{kind}" in ray.cluster_resources() for kind in KINDS_WITHOUT_BFLOAT16)

    @property
    def ends_with_us(self) -> bool:
        """Whether this connection started the cluster, which therefore stops with this process."""
        return self._local is not None

    @property
    def is_lost(self) -> bool:
        """Whether a service of the cluster has died, so that Ray would not answer."""
        return self._watch is not None and self._watch.is_lost

    def require_cluster(self) -> None:
        """Raise LostClusterError if a service of the cluster has died."""
        if self._watch is not None:
            self._watch.require_cluster()

    def wait_for_cluster(self) -> None:
        """Wait until the services of the cluster answer. Raises LostClusterError if one has died."""
        if self._watch is not None:
            self._watch.wait_for_cluster()

    def continue_services(self) -> None:
        """Let the services of our own cluster continue if they are stopped (SIGSTOP): calls of Ray wait for them."""
        if self._local is not None:
            self._local.continue_processes()

    def close(self) -> None:
        """Disconnect, and stop the cluster if `open` started it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()
        if self._local is not None:
            self._local.stop()
            self._local = None
        elif self._is_ours:
            ray.shutdown()
        self._is_ours = False


def gpus_for(pools: Sequence[RayResourcePool]) -> int:
    """Return the number of GPUs that hold the places of all pools; a place has its share of one GPU."""
    places: Counter[float] = Counter()
    for pool in pools:
        places[pool.share.get("GPU", 0.0)] += pool.world_size
    return sum(math.ceil(count / math.floor(1 / share + EPSILON)) for share, count in places.items() if share)


def _require_reachable(address: str) -> None:
    """Raise ConfigError unless HOST:PORT accepts connections; Ray would retry for minutes."""
    found = _found_by_ray() if address == "auto" else address
    host, _, port = found.rpartition(":")
    if not port.isdigit():
        return  # Ray rejects an invalid address at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        last = f", the last cluster started here: {found} (`ray stop` clears it)" if address == "auto" else ""
        raise ConfigError(
            f"no Ray cluster answers at address={address!r}{last} ({error}); start one with `ray start --head`, or "
            f"leave the address empty to start a local cluster with the run."
        ) from error


def _found_by_ray() -> str:
    """Return the address that "auto" stands for: RAY_ADDRESS, or the last cluster started here; "" if there is none."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return canonicalize_bootstrap_address("auto") or ""
    except (ConnectionError, ValueError):  # connecting raises it again, with the reason
        return ""
