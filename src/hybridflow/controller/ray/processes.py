"""The driver's view of a cluster: worker processes, the roles in them, calls, and handles of stored values."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hybridflow.controller.class_with_init_args import ClassWithInitArgs, ProcessThreads
from hybridflow.controller.ray.resource_pool import RayResourcePool
from hybridflow.controller.ray.transport import StoredBatch, unpack
from hybridflow.controller.worker_side import described
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.protocol.handle import Duration, Handle
from hybridflow.protocol.rows import RowIndex
from hybridflow.runtime.observe.trace import Sources
from hybridflow.runtime.process_address import ProcessAddress

E = TypeVar("E", bound=WorkerError)

SECOND_THREAD = "second_thread"
"""Ray's concurrency group of the calls that run in the second thread of a process."""


@dataclass(frozen=True)
class Home:
    """The node and the process address of a worker. `gpu_ids`: the GPUs that Ray assigned to it."""

    node_id: str
    node_address: str
    hostname: str
    address: ProcessAddress
    gpu_ids: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Launch:
    """The arguments with which a group's processes are started."""

    classes: Mapping[str, ClassWithInitArgs]
    pool: RayResourcePool

    @property
    def label(self) -> str:
        """The roles of each process, for logs and errors."""
        return "+".join(self.classes)


class RayProcess:
    """A worker process.

    `unfinished`: the calls that are not known to have finished, oldest first; the process runs the first of them, as
    many as `threads` says, and the first of those of its second thread. `home`: None until it has started.
    `exit_error`: the error for which it was stopped or lost. `has_failed`: whether a method has raised an
    error. `peers`: the processes of all ranks. `launch`: what it was started with. `workers`: the
    references to its roles.
    """

    def __init__(self, actor: Any, label: str, rank: int, roles: set[str], launch: Launch) -> None:
        self.actor, self.label, self.rank, self.roles, self.launch = actor, label, rank, roles, launch
        self.home: Home | None = None
        self.workers: list[RayWorker] = []
        self.unfinished: list[RayCall] = []
        self.is_stopped = self.has_failed = False
        self.threads = ProcessThreads()
        self.exit_error: WorkerError | None = None
        self.peers: list[RayProcess] = [self]
        self.on_last_stop: Callable[[], None] = lambda: None
        self._remote_calls: dict[tuple[int, bool], Any] = {}

    def remote_call(self, num_returns: int, in_second_thread: bool) -> Any:
        """Return the actor's method `call`, to be called with this number of results, in the second thread or not."""
        key = num_returns, in_second_thread
        if key not in self._remote_calls:
            options = {"concurrency_group": SECOND_THREAD} if in_second_thread else {}
            self._remote_calls[key] = self.actor.call.options(num_returns=num_returns, **options)
        return self._remote_calls[key]

    def error(self, kind: type[E], message: str) -> E:
        """Return an error that names this process."""
        return kind(message, role=self.label.rpartition("/")[0], rank=self.rank, node=self.node)

    @property
    def node(self) -> str:
        """The address of the node; "" until the process has started."""
        return self.home.node_address if self.home else ""

    @property
    def place(self) -> str:
        """The label of the process, with its node and pid once it has started, for messages."""
        return self.label + (f" on node {self.node}, pid {self.home.address.pid}" if self.home else "")


class RayWorker:
    """A reference to one role in one worker process."""

    def __init__(self, name: str, role: str, rank: int, class_name: str, process: RayProcess) -> None:
        self.name, self.role, self.rank, self.class_name, self.process = name, role, rank, class_name, process
        self.is_stopped = False

    def error(self, kind: type[E], message: str) -> E:
        """Return an error that names this worker."""
        return kind(message, role=self.role, rank=self.rank, node=self.process.node)

    def __repr__(self) -> str:
        return f"RayWorker({self.name!r})"


class RayCall:
    """A call that was sent to a worker.

    `done`: a small stored object that exists when the call has finished. `after`: the calls whose results it reads.
    `sent`: seconds of `time.time()`. `small_value`: the frozen result if it is small; a large result is not referenced
    here. `in_second_thread`: whether it runs in the second thread of its process.
    """

    def __init__(
        self,
        done: Any,
        worker: RayWorker,
        where: str,
        timeout_s: float | None,
        after: Sequence["RayCall"] = (),
        sources: Sources = (),
        *,
        in_second_thread: bool = False,
    ) -> None:
        self.in_second_thread = in_second_thread
        self.done, self.worker, self.where, self.timeout_s, self.sources = done, worker, where, timeout_s, sources
        self._after = list(after)
        self.sent = time.time()
        self.running_since: float | None = None
        self.is_finished = False
        self.duration = Duration()
        self.small_value: bytes | None = None

    @property
    def running_s(self) -> float:
        """The seconds since the driver has known that the call runs."""
        return time.monotonic() - self.running_since if self.running_since is not None else 0.0

    def awaited(self) -> "RayCall | None":
        """Return an unfinished call whose result this call reads; None if it can run."""
        while self._after and self._after[-1].is_finished:
            self._after.pop()
        return self._after[-1] if self._after else None

    def predecessor(self) -> "RayCall | None":
        """Return the oldest call of its process that must finish before this one can run; None if it can run."""
        process = self.worker.process
        same = [call for call in process.unfinished if call.in_second_thread == self.in_second_thread]
        return same[0] if self in same[1 if self.in_second_thread else process.threads.concurrent_calls :] else None

    def forget_unfinished(self) -> None:
        """Remove the call from the unfinished calls of its process."""
        with suppress(ValueError):  # it is not listed, or another thread has removed it
            self.worker.process.unfinished.remove(self)


class Store(Protocol):
    """The component that waits for handles and fetches their values."""

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait until the calls of the handles have finished."""
        ...

    def fetch(self, handle: "RayHandle") -> Any:
        """Return the packed value of a handle whose call has finished."""
        ...

    def note_read(self, handle: "RayHandle", start: float, contents: Any) -> None:
        """Record that `contents` were read, starting at time `start`."""
        ...


class RayHandle:
    """A handle of a value in the cluster's object stores: a value that was put, or the result of a call."""

    others: Sequence[Handle] = ()

    def __init__(self, store: Store, value: Any, call: RayCall | None = None, produced: tuple[str, ...] = ()) -> None:
        self.store, self.value, self.call, self.produced = store, value, call, produced
        self.where = call.where if call else ""
        self.duration = call.duration if call else Duration()

    def get(self) -> Any:
        """Wait for the value and return it."""
        return self._open(lambda packed: unpack(packed, ()))

    def read(self, columns: tuple[str, ...] | None, rows: RowIndex, *, shared: bool = False) -> Any:
        """Wait for the value and return the selected columns and rows. Raises BatchError if it is not a batch."""
        return self._open(lambda packed: StoredBatch(packed).read(columns, rows, shared=shared))

    @staticmethod
    def wait_for(handles: "Sequence[RayHandle]") -> None:
        """Wait until the calls of all handles have finished."""
        for store in {id(handle.store): handle.store for handle in handles}.values():
            store.wait([handle for handle in handles if handle.store is store])

    def _open(self, unpack_value: Callable[[Any], Any]) -> Any:
        if self.call is not None and not self.call.is_finished:
            self.store.wait([self])
        start = time.time()
        try:
            contents = unpack_value(self.store.fetch(self))
        except (HybridFlowError, KeyboardInterrupt):
            raise
        except Exception as error:  # classes of the value may raise any error outside their own process
            raise WorkerError(
                f"the result of {self.where or 'put()'} cannot be unpickled in this process: {described(error)}"
            ) from error
        self.store.note_read(self, start, contents)
        return contents

    def release(self) -> None:
        """Release the value."""
        self.value = self.call = None

    @property
    def ref(self) -> Any:
        """The stored object; None if it was released."""
        return self.value if self.value is not None or self.call is None else self.call.done
