"""`LocalBackend`: runs every rank in this process, one after another.

Dispatch, padding and collect are the same as on other backends, and a breakpoint or a traceback shows the worker's
code. A call runs at once and raises its error itself.
"""

import copy
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from tensordict import TensorDictBase

from hybridflow.controller.backend import CallTerms, PerRank, WorkerRef
from hybridflow.controller.class_with_init_args import ClassWithInitArgs, threads_of
from hybridflow.controller.columns import produced_columns, sources_of
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import RANKS_TAKE_TURNS, Worker, set_colocated, variables
from hybridflow.controller.worker_side import NamingErrors, checked_output
from hybridflow.errors import BatchError, DispatchError, HybridFlowError, WorkerError
from hybridflow.protocol import DataProto, DataProtoFuture, Handle
from hybridflow.protocol.future import change_each
from hybridflow.protocol.handle import Duration, HeldBatch, take
from hybridflow.protocol.packed_batch import batch_bytes
from hybridflow.protocol.rows import RowIndex
from hybridflow.runtime.observe import Trace, TraceEvent, get_logger
from hybridflow.runtime.observe.trace import DRIVER, Sources
from hybridflow.runtime.observe.waits import Waits


def private_copy(value: Any, what: str) -> Any:
    """Return a copy of `value` with its own memory; tensors are detached, and a view is copied without its base.

    Functions and classes are shared; the contents of a future are copied when they are read. `what` names the value in
    the DispatchError raised for an object that cannot be copied, such as a lock or an open file.
    """
    if isinstance(value, DataProto):
        batch = None if value.batch is None else value.batch.detach().clone()
        columns = {key: private_copy(column, f"{what}[{key!r}]") for key, column in value.non_tensor_batch.items()}
        meta_info = private_copy(value.meta_info, what)
        return dataclasses.replace(value, batch=batch, non_tensor_batch=columns, meta_info=meta_info)
    if isinstance(value, (torch.Tensor, TensorDictBase)):
        return value.detach().clone()
    if isinstance(value, np.ndarray) and value.dtype == object:
        copied = np.empty(value.shape, dtype=object)
        for index, element in np.ndenumerate(value):
            copied[index] = private_copy(element, what)
        return copied
    if isinstance(value, DataProtoFuture):
        own = value.with_handles(  # handles other than HeldBatch copy when they are read
            lambda handle: HeldBatch(private_copy(handle.batch, what)) if isinstance(handle, HeldBatch) else handle
        )
        own.meta_info = private_copy(value.meta_info, what)
        return own
    if type(value) is dict:
        return {key: private_copy(element, what) for key, element in value.items()}
    if type(value) is list:
        return [private_copy(element, what) for element in value]
    if type(value) is tuple:
        return tuple(private_copy(element, what) for element in value)
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise DispatchError(
            f"{what} is a {type(value).__name__}, which cannot be copied ({error}); pass data, and build the object "
            f"inside the worker."
        ) from error


def copy_of_objects(batch: DataProto) -> DataProto:
    """Return the batch with copied objects and meta_info; tensors and arrays of numbers are shared."""
    arrays = {
        name: private_copy(array, name) if array.dtype.hasobject else array
        for name, array in batch.non_tensor_batch.items()
    }
    return batch._unchecked(batch.batch, arrays, private_copy(batch.meta_info, "meta_info"), batch.auto_padding)


# Environment variables belong to the process, so ranks called from different threads also run one after another.
_rank_lock = threading.RLock()


class LocalHandle(Handle):
    """A handle that owns a value. A call has finished when its handle exists, so reading never waits."""

    def __init__(self, value: Any, where: str = "", trace: Trace | None = None, worker: str = "") -> None:
        self._value: list[Any] = [value]
        self.duration = Duration()
        self.where, self._trace, self._worker = where, trace, worker

    @property
    def produced(self) -> tuple[str, ...]:
        """The columns of the value; empty if it is not a batch or was released."""
        return produced_columns(self._value[0]) if self._value else ()

    def get(self) -> Any:
        """Return a private copy of the value and record the read in the trace."""
        return self._recorded(self.open_in_worker())

    def read(self, columns: tuple[str, ...] | None, rows: RowIndex, *, shared: bool = False) -> DataProto:
        """Return the selected columns and rows; with `shared`, tensors and arrays of numbers are not copied."""
        value = self._held_value()
        if not isinstance(value, DataProto):
            raise BatchError(f"the call returned a {type(value).__name__}, which has no columns; use get().")
        selected = take(value, columns, rows)
        # Concatenation copies numbers; objects would be shared.
        return self._recorded(copy_of_objects(selected) if shared else private_copy(selected, "a result"))

    def open_in_worker(self) -> Any:
        """Return a private copy of the value as an argument of a call; the trace does not record it."""
        return private_copy(self._held_value(), "a result")

    def _recorded(self, contents: Any) -> Any:
        if self._trace is not None and (columns := produced_columns(contents)):
            now, size, sources = time.time(), batch_bytes(contents), ((self.where, columns),)
            event = TraceEvent("read", self.where, self._worker, "", now, now, bytes_in=size, sources=sources)
            self._trace.record(event)
        return contents

    def _held_value(self) -> Any:
        if not self._value:
            raise WorkerError("this result was released; keep the future, or the result of get(), not the handle.")
        return self._value[0]

    def release(self) -> None:
        """Release the value."""
        self._value.clear()


class LocalWorker:
    """A rank: its worker object, its name and its environment variables."""

    def __init__(self, name: str, role: str, rank: int, environment: dict[str, str]) -> None:
        self.name, self.role, self.rank, self.environment = name, role, rank, environment
        self.instance: Any = None


class LocalBackend:
    """A backend that runs all workers in this process."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._workers: WeakSet[LocalWorker] = WeakSet()
        self._node, self._waits = socket.gethostname(), Waits()

    def check_fit(self, resource_pools: Sequence[ResourcePool]) -> None:
        """Accept all pools: one process holds any number of ranks."""

    def spawn(
        self, classes: Mapping[str, ClassWithInitArgs], resource_pool: ResourcePool
    ) -> dict[str, list[LocalWorker]]:
        """Construct the workers of all classes in this process, as specified by `Backend.spawn`."""
        threads_of(classes)
        spawned = {name: self._spawn(name, cls_with_init, resource_pool) for name, cls_with_init in classes.items()}
        for rank in range(resource_pool.world_size):
            set_colocated({name: workers[rank].instance for name, workers in spawned.items()})
        return spawned

    def _spawn(self, name: str, cls_with_init: ClassWithInitArgs, resource_pool: ResourcePool) -> list[LocalWorker]:
        port, workers = _free_port(), []
        for rank in range(resource_pool.world_size):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(resource_pool.world_size),
                "LOCAL_RANK": str(resource_pool.local_rank(rank)),
                "LOCAL_WORLD_SIZE": str(resource_pool.local_world_size(rank)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **({RANKS_TAKE_TURNS: "1"} if resource_pool.world_size > 1 else {}),
                **resource_pool.environment,
            }
            worker = LocalWorker(f"{name}/{rank}", name, rank, environment)
            cls = cls_with_init.cls
            args, kwargs, _ = _receive(cls_with_init.args, cls_with_init.kwargs, f"{cls.__name__}.__init__")
            with _active_rank(worker, f"{cls.__name__}.__init__"):
                worker.instance = cls(*args, **kwargs)
            workers.append(worker)
        self._workers.update(workers)
        return workers

    def call_all(
        self, workers: Sequence[WorkerRef], method_name: str, per_rank: PerRank, terms: Sequence[CallTerms]
    ) -> list[LocalHandle]:
        """Run the method on one worker after another, on this thread, as specified by `Backend.call_all`."""
        handles = []
        for worker, (args, kwargs), own_terms in zip(workers, per_rank, terms, strict=True):
            if not isinstance(worker, LocalWorker) or worker.instance is None:
                raise WorkerError(f"worker {worker.name} was shut down; {method_name} cannot be called on it.")
            where = f"{type(worker.instance).__name__}.{method_name}"
            with self._waits.during_call() as time_of_call:
                with self.trace.paused():  # the trace records reads of the controller, not of workers
                    own_args, own_kwargs, sources = _receive(args, kwargs, where, own_terms.opens_futures)
                received = time.time()
                with _active_rank(worker, where):
                    result = getattr(worker.instance, method_name)(*own_args, **own_kwargs)
                    result = checked_output(result, own_terms, worker.rank)
                computed = time.time()
                own_result = private_copy(result, f"the result of {where}")
                handles.append(LocalHandle(own_result, where, self.trace, worker.name))
                start, end = time_of_call.start, time_of_call.end()
            event = TraceEvent("call", where, worker.name, self._node, start, end, sources=sources, process=DRIVER)
            bytes_in = sum(map(batch_bytes, [*own_args, *own_kwargs.values()]))
            times = {"transfer_s": received - start + end - computed, "waited_s": time_of_call.waited_s}
            self.trace.record(event._replace(bytes_in=bytes_in, bytes_out=batch_bytes(result), **times))
            handles[-1].duration.note(start, end)
        return handles

    def put(self, value: Any) -> LocalHandle:
        """Store a private copy of a value."""
        return LocalHandle(private_copy(value, "a value to put"), trace=self.trace)

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        """Return a private copy of each value, in order."""
        return [handle.get() for handle in handles]

    def wait(self, handles: Sequence[Handle]) -> None:
        """Return at once: a call has finished when `call_all` returns."""

    def release(self, handles: Sequence[Handle]) -> None:
        """Release the values."""
        for handle in handles:
            if isinstance(handle, LocalHandle):
                handle.release()

    def running(self) -> list[tuple[str, float]]:
        """Return an empty list: a call has finished when `call_all` returns."""
        return []

    def is_alive(self, worker: WorkerRef) -> bool:
        """Return whether the worker has not been shut down."""
        return isinstance(worker, LocalWorker) and worker.instance is not None

    def shutdown(self, workers: Sequence[WorkerRef]) -> None:
        """Close the workers and drop their objects; an error in it is logged, as another may have ended the run."""
        for worker in workers:
            if isinstance(worker, LocalWorker):
                instance, worker.instance = worker.instance, None
                if isinstance(instance, Worker):
                    try:
                        with _active_rank(worker, f"{type(instance).__name__}.close"):
                            instance.close()
                    except HybridFlowError as error:
                        get_logger(__name__).warning("%s", error)

    def close(self) -> None:
        """Stop every worker."""
        self.shutdown(list(self._workers))


def _receive(
    args: Sequence[Any], kwargs: Mapping[str, Any], where: str, opens_futures: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], Sources]:
    """Return the arguments as the worker gets them, and the sources of their columns.

    Handles and futures are opened, everything else is copied.
    """
    given = [*enumerate(args), *kwargs.items()]
    narrow = {key: change_each(value, DataProtoFuture, DataProtoFuture.narrow) for key, value in given}

    def receive(key: int | str) -> Any:
        value = change_each(narrow[key], LocalHandle, LocalHandle.open_in_worker)
        if opens_futures:
            value = change_each(value, DataProtoFuture, DataProtoFuture.get)
        return private_copy(value, f"argument {key} of {where}")

    own_kwargs = {key: receive(key) for key in kwargs}
    return tuple(receive(index) for index in range(len(args))), own_kwargs, sources_of(narrow.values())


@contextmanager
def _active_rank(worker: LocalWorker, where: str) -> Iterator[None]:
    """Make the process this rank: set its environment variables, name it in errors, log its memory at debug level."""
    environment = {RANKS_TAKE_TURNS: None, **worker.environment}
    with _rank_lock, variables(environment), NamingErrors(where, worker.name, worker.role, worker.rank):
        yield


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
