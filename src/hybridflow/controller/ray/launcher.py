"""Starts the worker processes of a group and constructs the objects of their roles; also once more, after a failure."""

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from hybridflow.controller.class_with_init_args import ClassWithInitArgs, threads_of
from hybridflow.controller.ray.processes import SECOND_THREAD, Launch, RayCall, RayProcess, RayWorker
from hybridflow.controller.ray.resource_pool import ReservedPlace
from hybridflow.controller.ray.transport import Outgoing, pickled_class
from hybridflow.controller.ray.waiting import Waiting
from hybridflow.controller.ray.worker_process import WorkerProcess
from hybridflow.runtime.fault_points import FAULTS_VARIABLE
from hybridflow.runtime.observe.log import LEVEL_VARIABLE

START_TIMEOUT_S = 300.0
"""The shortest deadline for the start of a process, in seconds; Ray may be slow to start one."""

FORWARDED = (LEVEL_VARIABLE, FAULTS_VARIABLE)
"""Environment variables of the driver that workers get too."""


class Launcher:
    """Starts processes on their places. `call_timeout_s()` is the deadline of a call, in seconds, or None.

    `threads`, `compress`: as of `RayBackend`. `stores`: the prefix of the names of the groups' stores.
    """

    def __init__(
        self, waiting: Waiting, call_timeout_s: Callable[[], float | None], threads: int, compress: bool
    ) -> None:
        self._waiting, self._call_timeout_s = waiting, call_timeout_s
        self._threads, self._compress = threads, compress
        self.stores = f"stores-{secrets.token_hex(8)}"

    def start(self, launch: Launch, *, standby: bool = False) -> list[RayProcess]:
        """Ask Ray for a process at each place of the pool; `build` waits for them.

        `standby`: a process on the node of the place, without its resources, which the process at the place has.
        """
        threads = threads_of(launch.classes)
        groups = {SECOND_THREAD: 1} if threads.of_second else None
        actors: Any = ray.remote(concurrency_groups=groups)(WorkerProcess)  # pyright: ignore
        importable = [os.path.abspath(path) for path in sys.path if path != ""] + [os.getcwd()]
        processes: list[RayProcess] = []
        for rank, place in enumerate(launch.pool.places()):
            label = f"{launch.label}/{rank}"
            of_place = _options(place, launch, standby=standby)
            options = {"max_restarts": 0, "max_concurrency": threads.concurrent_calls, **of_place}
            actor = actors.options(**options).remote(label, importable, os.getcwd())
            process = RayProcess(actor, label, rank, set(launch.classes), launch)
            process.peers, process.on_last_stop = processes, launch.pool.give_up_tenancy
            process.threads = threads
            processes.append(process)
        return processes

    def build(self, processes: Sequence[RayProcess], classes: Mapping[str, ClassWithInitArgs]) -> None:
        """Wait for the processes of a group and construct the objects of all ranks at the same time.

        Constructors may use collectives.
        """
        timeout_s = self._call_timeout_s()
        timeout_s = timeout_s and max(timeout_s, START_TIMEOUT_S)
        for process, home in zip(processes, self.ask(processes, "home", timeout_s=timeout_s), strict=True):
            process.home = home
        packed = {}
        for name, cls_with_init in classes.items():
            outgoing, where = Outgoing(), f"{cls_with_init.cls.__name__}.__init__"
            args = [
                outgoing.pack(value, f"argument {index} of {where}") for index, value in enumerate(cls_with_init.args)
            ]
            kwargs = {
                key: outgoing.pack(value, f"argument {key} of {where}") for key, value in cls_with_init.kwargs.items()
            }
            packed[name] = (pickled_class(cls_with_init.cls), args, kwargs)
        (port,) = self.ask(processes[:1], "free_port")
        store = f"{self.stores}/{secrets.token_hex(4)}"
        shared, homes = ray.put(packed), [process.home for process in processes if process.home]
        nodes = [home.node_id for home in homes]
        arguments = []
        for rank, node in enumerate(nodes):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_RANK": str(nodes[:rank].count(node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "MASTER_ADDR": homes[0].node_address,
                "MASTER_PORT": str(port),
                **processes[0].launch.pool.environment,
            }
            environment |= {name: os.environ[name] for name in FORWARDED if name in os.environ}
            arguments.append((shared, environment, store, self._threads, self._compress))
        where = "+".join(f"{cls_with_init.cls.__name__}.__init__" for cls_with_init in classes.values())
        self.ask(processes, "build", arguments, where)

    def ask(
        self,
        processes: Sequence[RayProcess],
        method: str,
        arguments: Any = None,
        where: str = "",
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method of `WorkerProcess` on all processes at the same time and return the results."""
        calls = []
        for index, process in enumerate(processes):
            ref = getattr(process.actor, method).remote(*(arguments[index] if arguments else ()))
            worker = RayWorker(process.label, process.label.rpartition("/")[0], process.rank, "", process)
            calls.append(RayCall(ref, worker, where or f"WorkerProcess.{method}", timeout_s or self._call_timeout_s()))
            self._waiting.track(calls[-1])
        self._waiting.wait(calls)
        return [ray.get(call.done) for call in calls]


def _options(place: ReservedPlace, launch: Launch, *, standby: bool) -> dict[str, Any]:
    if standby:
        strategy = NodeAffinitySchedulingStrategy(place.node.node_id, soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy}
    share, bundle = launch.pool.share_of_one_group, place.bundle
    strategy = PlacementGroupSchedulingStrategy(place.group, bundle, placement_group_capture_child_tasks=False)
    return {"num_cpus": share["CPU"], "num_gpus": share.get("GPU", 0), "scheduling_strategy": strategy}
