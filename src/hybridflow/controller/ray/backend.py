"""`RayBackend`: runs every rank in a separate process, on the nodes of a Ray cluster.

`calls.py` sends and reads, `launcher.py` starts processes, `waiting.py` finds out what became of a call.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Self

import ray

from hybridflow.controller.backend import WorkerRef
from hybridflow.controller.class_with_init_args import ClassWithInitArgs, threads_of
from hybridflow.controller.ray.calls import RayCalls
from hybridflow.controller.ray.cluster import Connection
from hybridflow.controller.ray.launcher import Launcher
from hybridflow.controller.ray.liveness.heartbeat import delete_heartbeat
from hybridflow.controller.ray.probe import probe_nodes
from hybridflow.controller.ray.processes import Launch, RayProcess, RayWorker
from hybridflow.controller.ray.resource_pool import (
    RayResourcePool,
    choose_fitting,
    nodes_of_cluster,
    require_fit,
)
from hybridflow.controller.ray.standbys import Standbys
from hybridflow.controller.ray.store import delete_stores
from hybridflow.controller.ray.waiting import DIED, POLL_INTERVAL_S, Waiting
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import ConfigError, LostClusterError, LostWorkerError
from hybridflow.runtime.observe import Trace


class RayBackend(RayCalls):
    """A backend that runs workers on a Ray cluster.

    `address`: address of a running cluster; "" uses the cluster that this process is connected to, or otherwise starts
    a local cluster with the first group, which stops with `close()` or at the end of the process. `num_cpus`,
    `num_gpus`, `object_store_bytes`: logical resources and shared memory of that local cluster; by default, the
    resources that the first pool requests, and Ray's choice of memory. More GPUs than this machine has are an error.
    `call_timeout_s`: the deadline of every call in seconds without progress; None: no deadline. `heartbeat_timeout_s`:
    seconds without a heartbeat until a process that a call waits for is lost; None: do not look. `report_after_s`:
    seconds without progress until a wait logs who waits for whom; None: never. `threads`: CPU threads of each rank; 0:
    its share of the physical cores. `compress`: compress sent data with zstd. Use the backend as a context,
    or call `close()`.
    """

    def __init__(
        self,
        address: str = "",
        *,
        num_cpus: float = 0,
        num_gpus: int = 0,
        object_store_bytes: int | None = None,
        call_timeout_s: float | None = 3600.0,
        heartbeat_timeout_s: float | None = 60.0,
        report_after_s: float | None = 60.0,
        threads: int = 0,
        compress: bool = False,
    ) -> None:
        of_name = {"call_timeout_s": call_timeout_s, "heartbeat_timeout_s": heartbeat_timeout_s}
        for name, seconds in (of_name | {"report_after_s": report_after_s}).items():
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{name}={seconds} is invalid: expected seconds above 0, or None.")
        self.call_timeout_s, self.threads = call_timeout_s, threads
        self.connection = Connection(address, num_cpus, num_gpus, object_store_bytes)
        self._processes: list[RayProcess] = []
        self._trace = Trace()
        require_cluster = self.connection.require_cluster
        waiting = Waiting(
            self._processes, self._stop, self._trace, require_cluster, heartbeat_timeout_s, report_after_s
        )
        RayCalls.__init__(self, waiting, self._trace, lambda: self.call_timeout_s, compress)
        self._own_pools: dict[ResourcePool, RayResourcePool] = {}
        self._measured_nodes: set[str] = set()
        self._launcher = Launcher(self._waiting, lambda: self.call_timeout_s, threads, compress)
        self._standbys = Standbys(self._launcher, self._is_connected)

    @property
    def trace(self) -> Trace:
        """The calls and transfers that are known to have finished."""
        self._waiting.collect_finished()
        return self._trace

    # ------------------------------------------------------------------------------------------ workers

    def check_fit(self, resource_pools: Sequence[ResourcePool]) -> None:
        """Connect to the cluster and raise ConfigError, within seconds, unless all pools together fit."""
        pools = [self._as_ray_pool(pool) for pool in resource_pools]
        if pools:
            self.connection.open(pools)
            require_fit(pools)

    def choose_fitting(
        self, options: Sequence[Sequence[RayResourcePool]], instead_of: Sequence[RayWorker] = ()
    ) -> list[RayResourcePool]:
        """Connect to the cluster and return one pool of each list, the earliest that fit together.

        `instead_of`: workers whose groups are stopped first; `restart` or `spawn` must follow. If not even the last
        pools fit, raises ConfigError without workers, otherwise as `restart`.
        """
        self.connection.open([pools[0] for pools in options])
        self._stop([peer for worker in instead_of for peer in worker.process.peers])
        try:
            return choose_fitting(options)
        except ConfigError as error:
            if not instead_of:
                raise
            raise self._lost_places(error) from error

    def spawn(
        self, classes: Mapping[str, ClassWithInitArgs], resource_pool: ResourcePool
    ) -> dict[str, list[RayWorker]]:
        """Start the processes of a group, as specified by `Backend.spawn`."""
        launch = Launch(classes, self._as_ray_pool(resource_pool))
        threads_of(launch.classes)  # before anything starts
        self.connection.open([launch.pool])
        processes = self._start(launch)
        self._build(launch, processes)
        workers = {
            name: [RayWorker(f"{name}/{p.rank}", name, p.rank, cls_with_init.cls.__name__, p) for p in processes]
            for name, cls_with_init in classes.items()
        }
        for process in processes:
            process.workers = [of_role[process.rank] for of_role in workers.values()]
        return workers

    def settle(self, workers: Sequence[RayWorker], timeout_s: float) -> list[RayWorker]:
        """Wait until no call of the workers is unfinished; return the workers of groups that cannot go on.

        These are the groups in which a process has ended or a method has raised an error, after which ranks may be out
        of sync, or in which a call takes longer than `timeout_s`: its processes are stopped. Errors of calls are
        dropped. Raises LostClusterError if the cluster has died.
        """
        self.connection.wait_for_cluster()  # workers that die with a service are known before its death is
        processes = list(dict.fromkeys(worker.process for worker in workers))
        deadline = time.monotonic() + timeout_s
        while busy := [process for process in processes if process.unfinished and not process.is_stopped]:
            is_late = time.monotonic() > deadline
            for process in busy:  # ranks whose peer has failed may wait for it in a collective
                if is_late or any(peer.has_failed or peer.is_stopped for peer in process.peers):
                    self._stop(process.peers)
            self._waiting.collect_finished()
            time.sleep(POLL_INTERVAL_S / 10)
        failed = {worker.process for worker in workers if not self.is_alive(worker) or worker.process.has_failed}
        return [worker for worker in workers if failed.intersection(worker.process.peers)]

    def restart(self, workers: Sequence[RayWorker]) -> None:
        """Replace the processes of the groups of these workers by new ones, with objects built from the same arguments.

        The references to the workers, and groups that hold them, then mean the new processes. Raises LostWorkerError if
        their places are gone (LostClusterError if they cannot come back), and as `spawn`.
        """
        old: dict[RayProcess, Launch] = {}  # rank 0 of each group
        for worker in workers:
            old.setdefault(worker.process.peers[0], worker.process.launch)
        self._stop([peer for process in old for peer in process.peers])
        new: dict[RayProcess, list[RayProcess]] = {}
        try:
            for first, launch in old.items():
                try:
                    new[first] = self._start(launch, first.peers)
                except ConfigError as error:  # the places did fit
                    raise self._lost_places(error) from error
            for first, launch in old.items():
                self._build(launch, new[first])
                for process, before in zip(new[first], first.peers, strict=True):
                    process.workers, process.roles = before.workers, before.roles
                    for worker in process.workers:
                        worker.process = process
        except BaseException:  # also groups that were not built yet, which nothing refers to
            self._stop([process for processes in new.values() for process in processes])
            raise

    def keep_standbys(self, workers: Sequence[RayWorker]) -> None:
        """Start a standby for each rank of the groups of these workers that has none: `restart` uses them.

        Does not wait for them.
        """
        for launch in dict.fromkeys(worker.process.launch for worker in workers if not worker.process.is_stopped):
            self._standbys.provide(launch)

    def _lost_places(self, error: ConfigError) -> LostWorkerError:
        """Return the error of lost workers whose places are gone. Raises LostClusterError if the cluster has died."""
        self.connection.wait_for_cluster()
        if self.connection.ends_with_us and not nodes_of_cluster():
            return LostClusterError(f"the cluster of the run has lost its only node: {error}")
        return LostWorkerError(f"the nodes of lost workers have not come back: {error}")

    def _start(self, launch: Launch, lost: Sequence[RayProcess] = ()) -> list[RayProcess]:
        """Start the processes of a group, which `_build` waits for, or take its standbys in place of those `lost`."""
        launch.pool.take_tenancy()
        try:
            processes = self._standbys.take(launch, lost) or self._launcher.start(launch)
        except BaseException:
            launch.pool.give_up_tenancy()
            raise
        self._processes += processes
        return processes

    def _build(self, launch: Launch, processes: Sequence[RayProcess]) -> None:
        """Construct the objects of the processes; if one constructor raises, all are stopped."""
        try:
            self._launcher.build(processes, launch.classes)
            self.measure_nodes(processes, again=False)
        except BaseException:
            self._stop(processes)
            raise

    def measure_nodes(self, processes: Sequence[RayProcess] | None = None, again: bool = True) -> None:
        """Measure latency and bandwidth of each node with a worker process, for the trace and `transfer_report`.

        A node is measured when its first process starts, and when this method is called.
        """
        first_on: dict[str, RayProcess] = {}
        for process in self._processes if processes is None else processes:
            if process.home is not None and (again or process.home.node_id not in self._measured_nodes):
                first_on.setdefault(process.home.node_id, process)
        probe_nodes(list(first_on.values()), self._launcher.ask, self._trace)
        self._measured_nodes.update(first_on)

    def _as_ray_pool(self, pool: ResourcePool) -> RayResourcePool:
        """Return the pool, or the one RayResourcePool that stands for a plain pool."""
        if isinstance(pool, RayResourcePool):
            return pool
        if pool not in self._own_pools:
            more = {"max_colocate_count": pool.max_colocate_count, "environment": pool.environment}
            self._own_pools[pool] = RayResourcePool(pool.process_on_nodes, pool.use_gpu, **more)
        return self._own_pools[pool]

    def hostnames(self, workers: Sequence[WorkerRef]) -> set[str]:
        """Return the names of the hosts on which the workers run."""
        homes = [worker.process.home for worker in workers if isinstance(worker, RayWorker)]
        return {home.hostname for home in homes if home is not None}

    def place_of(self, worker: WorkerRef) -> str:
        """Return the name of the worker's process with its node and pid, for messages."""
        return worker.process.place if isinstance(worker, RayWorker) else worker.name

    def running(self) -> list[tuple[str, float]]:
        """Return worker and start of the oldest unfinished call of each process, unless it waits for another call."""
        oldest = [call for process in self._processes for call in process.unfinished[:1]]
        return [(call.worker.name, call.sent) for call in oldest if call.awaited() is None]

    def is_alive(self, worker: WorkerRef) -> bool:
        """Return whether the process of the worker runs, even if it is busy."""
        if not isinstance(worker, RayWorker) or worker.is_stopped or worker.process.is_stopped:
            return False
        try:
            ready, _ = ray.wait([worker.process.actor.__ray_ready__.remote()], timeout=POLL_INTERVAL_S)
            for ref in ready:
                ray.get(ref)
        except DIED:
            return False
        return True  # an unanswered request means busy: Ray reports a dead actor at once

    def shutdown(self, workers: Sequence[WorkerRef]) -> None:
        """Stop the workers; a process ends when all its roles are stopped."""
        unused = []
        for worker in workers:
            if isinstance(worker, RayWorker) and not worker.is_stopped:
                worker.is_stopped = True
                worker.process.roles.discard(worker.role)
                if not worker.process.roles:
                    unused.append(worker.process)
        self._stop(unused)
        for process in unused:
            if all(peer.is_stopped for peer in process.peers):
                self._standbys.stop(process.launch)

    def _stop(self, processes: Sequence[RayProcess]) -> None:
        for process in processes:
            if process.is_stopped:
                continue
            process.is_stopped = True
            if process in self._processes:
                self._processes.remove(process)
            if not self._is_connected():
                continue
            ray.kill(process.actor, no_restart=True)
            delete_heartbeat(process)
            if all(peer.is_stopped for peer in process.peers):
                process.on_last_stop()

    def close(self) -> None:
        """Stop every worker, release all reservations, and stop the cluster if this backend started it."""
        self.connection.continue_services()
        self._stop(list(self._processes))
        self._standbys.close()
        self._own_pools.clear()
        if ray.is_initialized() and not self.connection.ends_with_us and not self.connection.is_lost:
            delete_stores(self._launcher.stores)
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _is_connected(self) -> bool:
        return ray.is_initialized() and not self.connection.is_lost
