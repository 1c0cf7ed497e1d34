"""`WorkerProcess`: one rank as a Ray actor. It holds the objects of one or several roles; each call names its role.

Its methods run on the main thread, one after another, as collectives require. If the class allows concurrent calls,
each call runs in its own thread. If it has methods that run beside others, these have a thread, and the others another.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
import torch

from hybridflow.controller.ray.liveness.heartbeat import start_heartbeat
from hybridflow.controller.ray.processes import Home
from hybridflow.controller.ray.store import RayStore
from hybridflow.controller.ray.transport import (
    CallReply,
    Outgoing,
    cloudpickle,
    freeze,
    open_header,
    pack_error,
    thaw,
    unpack,
)
from hybridflow.controller.worker import set_colocated
from hybridflow.controller.worker_side import NamingErrors, checked_output
from hybridflow.errors import ConfigError
from hybridflow.protocol.packed_batch import batch_bytes
from hybridflow.runtime.allocator import keep_freed_memory, paused_collector
from hybridflow.runtime.observe import TraceEvent, memory_bytes
from hybridflow.runtime.observe.waits import CallTime, Waits
from hybridflow.runtime.process_address import ProcessAddress, allow_observers, own_address
from hybridflow.runtime.process_report import has_exited
from hybridflow.runtime.rendezvous import provide_stores
from hybridflow.runtime.threads import count_physical_cores

MEMORY_EVERY_S = 0.1
"""Minimum seconds between reads of the memory in use; a read takes longer than a small call."""

EXIT_POLL_S = 0.02

SEES_ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""The variable that makes Ray show every GPU of a node to each process, as "1" or "true"."""


class WorkerProcess:
    """The Ray actor of one rank. `label`: its name in logs and errors: roles, "/", rank."""

    def __init__(self, label: str, driver_path: list[str], working_directory: str) -> None:
        self.label = label
        self._instances: dict[str, Any] = {}
        self._node = socket.gethostname()
        self._memory, self._waits = (0.0, 0), Waits()
        self._rank, self._threads, self._compress = 0, 1, False
        self._gpu_ids = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        # A worker can import what the driver can, e.g. modules beside the driver's script.
        sys.path.extend(path for path in driver_path if path not in sys.path)
        if os.path.isdir(working_directory):  # so that relative paths of a recipe mean the same on every node
            os.chdir(working_directory)
        # Ctrl-C in a terminal reaches every process of the run; only the driver handles it.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        keep_freed_memory()
        allow_observers()
        start_heartbeat()

    def home(self) -> Home:
        """Return the node of the process, and its address for reports from outside."""
        node_id, node_address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        return Home(node_id, node_address, socket.gethostname(), own_address(), self._gpu_ids)

    def warm(self, pickled_classes: list[bytes], environment: Mapping[str, str]) -> None:
        """Import what classes need, as a standby, with the environment variables of the pool."""
        os.environ.update(environment)
        with paused_collector():
            for pickled_class in pickled_classes:
                cloudpickle.loads(pickled_class)

    def take_place(self, lost: ProcessAddress, gpu_ids: tuple[str, ...]) -> Home:
        """Take the place of a lost process, as its standby: wait until it has left its memory and its GPUs."""
        while not has_exited(lost):
            time.sleep(EXIT_POLL_S)
        if gpu_ids:  # this process has not used CUDA
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
            self._gpu_ids = gpu_ids
        return self.home()

    def free_port(self) -> int:
        """Return a free port of the node."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return sock.getsockname()[1]

    def take(self, refs: list[Any]) -> tuple[float, float]:
        """Copy stored arrays into this process; return the times at which the copy began and ended, in seconds."""
        start = time.time()
        for ref in refs:
            bytearray(ray.get(ref))
        return start, time.time()

    def build(
        self, packed_classes: Any, environment: Mapping[str, str], store: str, threads: int, compress: bool
    ) -> None:
        """Construct the object of each role, with the environment variables of an SPMD rank set.

        `store`: the name of the group's store.
        """
        self._compress = compress
        os.environ.update(environment)
        if interface := own_interface(ray.util.get_node_ip_address()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # by default it follows the host name
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # of this name, not of this prefix
        provide_stores(RayStore, store)
        self._rank = int(environment["RANK"])
        self._require_own_gpu()
        self._threads = threads or max(1, count_physical_cores() // int(environment["LOCAL_WORLD_SIZE"]))
        os.environ["OMP_NUM_THREADS"] = str(self._threads)
        torch.set_num_threads(self._threads)
        for name, (pickled_class, args, kwargs) in packed_classes.items():
            try:
                with paused_collector():
                    cls = cloudpickle.loads(pickled_class)
                where = f"{cls.__name__}.__init__"
                with NamingErrors(where, f"{name}/{self._rank}", name, self._rank):
                    self._instances[name] = cls(*unpack(args, ()), **unpack(kwargs, ()))
            except SystemExit:
                raise
            except BaseException as error:  # a constructor may raise any error; it is sent to the driver
                raise pack_error(error, f"{name}.__init__", name, self._rank, self._node) from None
        set_colocated(self._instances)
        self._waits = Waits()  # construction is not a wait

    def _require_own_gpu(self) -> None:
        """Raise ConfigError if the process was given a GPU, but sees others too, or none."""
        if not (gpus := ", ".join(self._gpu_ids)):
            return
        if os.environ.get(SEES_ALL_GPUS, "").lower() in ("1", "true"):
            problem = (
                f"{SEES_ALL_GPUS}={os.environ[SEES_ALL_GPUS]!r} is not supported: this rank sees all GPUs of node "
                f"{self._node} instead of GPU {gpus}, which Ray assigned to it, and could compute on that of another "
                "rank; unset the variable for the run, and before `ray start` on that node."
            )
        elif not torch.cuda.is_available():
            problem = (
                f"Ray assigned GPU {gpus} of node {self._node} to this rank, but torch {torch.__version__} finds no "
                f"CUDA device there (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}); install a "
                "CUDA build of torch and a driver on that node, or start Ray there with --num-gpus=0 to compute on "
                "CPUs."
            )
        else:
            return
        error = ConfigError(problem)
        raise pack_error(error, "a worker's start", self.label.rpartition("/")[0], self._rank, self._node)

    def call(self, message: Any, *objects: Any) -> Any:
        """Run a method and return a `CallReply` and the value, or the `CallReply` alone if the value will not be read.

        `message`: a header (role, method, terms) and the arguments. `objects`: the objects that the arguments refer to.
        """
        with self._waits.during_call() as time_of_call:
            event, frozen, is_read = self._run(message, objects, time_of_call)
        reply = CallReply(event, frozen if is_read and type(frozen) is bytes else None)
        return (freeze(reply, 0), frozen) if is_read else freeze(reply, 0)

    def _run(self, message: Any, objects: Sequence[Any], time_of_call: CallTime) -> tuple[TraceEvent, Any, bool]:
        """Run a method; return its event, its frozen result, and whether that will be read."""
        if threading.current_thread() is not threading.main_thread():
            torch.set_num_threads(self._threads)  # the setting is per thread
        try:
            header, packed_args, packed_kwargs = thaw(message)
            role, method_name, terms = open_header(header)
        except Exception as error:  # classes of the arguments may be missing here, or raise any error
            label = self.label.rpartition("/")[0]
            raise pack_error(error, "reading the arguments of a call", label, self._rank, self._node) from None
        instance = self._instances.get(role)
        where = f"{type(instance).__name__}.{method_name}"
        worker_name = f"{role}/{self._rank}"
        try:
            with NamingErrors(where, worker_name, role, self._rank):
                args, kwargs = unpack(packed_args, objects), unpack(packed_kwargs, objects)
                unpacked = time.time()
                bytes_in = sum(map(batch_bytes, [*args, *kwargs.values()]))
                output = getattr(instance, method_name)(*args, **kwargs)
                output = checked_output(output, terms, self._rank)
                computed = time.time()
                outgoing = Outgoing(compress=self._compress)
                value = outgoing.pack(output, f"the result of {where}")
                frozen = freeze(value, outgoing.num_bytes_in_all, outgoing.is_plain)
        except SystemExit:
            raise
        except BaseException as error:  # a method may raise any error; it is sent to the driver
            raise pack_error(error, where, role, self._rank, self._node) from None
        if (now := time.time()) - self._memory[0] > MEMORY_EVERY_S:
            self._memory = now, memory_bytes().get("resident", 0)
        event = TraceEvent(
            kind="call",
            where=where,
            worker=worker_name,
            node=self._node,
            start=time_of_call.start,
            end=(ended := time_of_call.end()),
            bytes_in=bytes_in,
            bytes_out=outgoing.num_bytes,
            transfer_s=unpacked - time_of_call.start + ended - computed,
            memory_bytes=self._memory[1],
            process=self.label,
            waited_s=time_of_call.waited_s,
        )
        return event, frozen, terms.is_read

    def __repr__(self) -> str:
        return self.label


def own_interface(address: str) -> str:
    """Return the name of this machine's network interface that has the address; "" if none has it."""
    addresses = psutil.net_if_addrs()
    return next((name for name, found in addresses.items() if address in {entry.address for entry in found}), "")
