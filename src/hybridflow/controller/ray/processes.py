"""What the driver holds of a cluster: worker processes, the roles in them, calls, and the values that calls make."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from hybridflow.controller.one_call import described
from hybridflow.controller.ray.transport import StoredBatch, unpack
from hybridflow.controller.ray.worker_process import Home
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.observability.trace import Sources
from hybridflow.protocol.handle import Duration, Handle
from hybridflow.protocol.row_index import RowIndex


class RayProcess:
    """One worker process, with the calls that have not ended as far as is known, oldest first.

    It runs the first `concurrent_calls` of them. `home` is None until it has started. `fate` is the error that ended
    it. `peers` are the processes of all ranks.
    """

    def __init__(self, actor: Any, label: str, rank: int, roles: set[str]) -> None:
        self.actor, self.label, self.rank, self.roles = actor, label, rank, roles
        self.home: Home | None = None
        self.unfinished: list[RayCall] = []
        self.is_stopped = self.is_detached = False
        self.concurrent_calls = 1
        self.fate: WorkerError | None = None
        self.peers: list[RayProcess] = [self]
        self.on_last_stop: Callable[[], None] = _nothing
        self._remote_calls: dict[int, Any] = {}

    def remote_call(self, num_returns: int) -> Any:
        """The actor's method `call` with so many results."""
        if num_returns not in self._remote_calls:
            self._remote_calls[num_returns] = self.actor.call.options(num_returns=num_returns)
        return self._remote_calls[num_returns]

    @property
    def node(self) -> str:
        """The address of its node."""
        return self.home.node_address if self.home else ""


class RayWorker:
    """One role in one process."""

    def __init__(self, name: str, role: str, rank: int, class_name: str, process: RayProcess) -> None:
        self.name, self.role, self.rank, self.class_name, self.process = name, role, rank, class_name, process
        self.is_stopped = False

    def __repr__(self) -> str:
        return f"RayWorker({self.name!r})"


class RayCall:
    """A call on its way. `done` is a small object that is there when it has ended; `after` are the calls whose results
    it reads. It holds nothing of the result, unless that is small: `small_value` is it, frozen."""

    def __init__(
        self,
        done: Any,
        worker: RayWorker,
        where: str,
        timeout_s: float | None,
        after: Sequence["RayCall"] = (),
        sources: Sources = (),
    ) -> None:
        self.done, self.worker, self.where, self.timeout_s, self.sources = done, worker, where, timeout_s, sources
        self._after = list(after)
        self.running_since: float | None = None
        self.is_finished = False
        self.duration = Duration()
        self.small_value: bytes | None = None

    def awaited(self) -> "RayCall | None":
        """Return a call whose result it reads and that has not ended, as far as is known; None if it can run."""
        while self._after and self._after[-1].is_finished:
            self._after.pop()
        return self._after[-1] if self._after else None

    def forget_unfinished(self) -> None:
        """It has ended, for its process."""
        with suppress(ValueError):  # it was not there, or another thread was faster
            self.worker.process.unfinished.remove(self)


class Store(Protocol):
    """Who can open a handle."""

    def wait(self, handles: Sequence[Handle]) -> None: ...

    def fetch(self, handle: "RayHandle") -> Any: ...

    def note_read(self, handle: "RayHandle", start: float, contents: Any) -> None: ...


class RayHandle:
    """A value in the cluster's stores: put there, or to be made by a call."""

    others: Sequence[Handle] = ()

    def __init__(self, store: Store, value: Any, call: RayCall | None = None, produced: tuple[str, ...] = ()) -> None:
        self.store, self.value, self.call, self.produced = store, value, call, produced
        self.where = call.where if call else ""
        self.duration = call.duration if call else Duration()

    def get(self) -> Any:
        return self._open(lambda packed: unpack(packed, ()))

    def read(self, columns: tuple[str, ...] | None, rows: RowIndex, *, shared: bool = False) -> Any:
        return self._open(lambda packed: StoredBatch(packed).read(columns, rows, shared=shared))

    @staticmethod
    def wait_for(handles: "Sequence[RayHandle]") -> None:
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
        except Exception as error:  # whatever the classes of the value raise where they are not at home
            raise WorkerError(
                f"what {self.where or 'put()'} returned cannot be opened in this process: {described(error)}"
            ) from error
        self.store.note_read(self, start, contents)
        return contents

    def release(self) -> None:
        """Let the value go."""
        self.value = self.call = None

    @property
    def ref(self) -> Any:
        """The stored object; None if it was let go."""
        return self.value if self.value is not None or self.call is None else self.call.done


def _nothing() -> None:
    pass
