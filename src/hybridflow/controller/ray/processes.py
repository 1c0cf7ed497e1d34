"""What the driver holds of a cluster: worker processes, the roles in them, and the values that calls make."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hybridflow.controller.ray.transport import StoredBatch, unpack
from hybridflow.controller.ray.worker_process import Home
from hybridflow.errors import WorkerError


class Store(Protocol):
    """Who can open a handle."""

    def wait(self, handles: "Sequence[RayHandle]") -> None: ...

    def fetch(self, handle: "RayHandle") -> Any: ...

    def note_read(self, handle: "RayHandle", start: float, contents: Any) -> None: ...


class RayProcess:
    """One worker process, with the calls that it has not finished, oldest first."""

    def __init__(self, actor: Any, home: Home, rank: int, roles: set[str]) -> None:
        self.actor, self.home, self.rank, self.roles = actor, home, rank, roles
        self.label = ""
        self.on_last_stop: Callable[[], None] = _nothing
        self.unfinished: list[RayHandle] = []
        self.is_stopped = self.is_detached = False
        self.fate: WorkerError | None = None
        self.peers: list[RayProcess] = []


class RayWorker:
    """One role in one process."""

    def __init__(self, name: str, role: str, rank: int, class_name: str, process: RayProcess) -> None:
        self.name, self.role, self.rank, self.class_name, self.process = name, role, rank, class_name, process
        self.is_stopped = False

    def __repr__(self) -> str:
        return f"RayWorker({self.name!r})"


class RayHandle:
    """A value in the cluster's stores, or a call that will make one: `done` tells that it has ended, `value` is it."""

    def __init__(
        self,
        backend: Store,
        done: Any,
        value: Any,
        *,
        worker: RayWorker | None = None,
        where: str = "",
        after: Any = (),
    ) -> None:
        self.backend, self.where, self.worker = backend, where, worker
        self.done: Any = done
        self.value: Any = value
        self.after: list[RayHandle] = list(after)
        self.running_since: float | None = None
        self.is_finished = worker is None

    def get(self) -> Any:
        return self._open(lambda packed: unpack(packed, ()))

    def read(self, columns: tuple[str, ...] | None, rows: Any) -> Any:
        """As `get`, of some columns and rows of a batch."""
        return self._open(lambda packed: StoredBatch(packed).read(columns, rows))

    def view(self, columns: tuple[str, ...] | None, rows: Any) -> Any:
        """As `read`, but in the store's own memory where that can be: for what is put together with others."""
        return self._open(lambda packed: StoredBatch(packed).view(columns, rows))

    def _open(self, unpack_value: Callable[[Any], Any]) -> Any:
        self.backend.wait([self])
        start = time.time()
        contents = unpack_value(self.backend.fetch(self))
        self.backend.note_read(self, start, contents)
        return contents

    def release(self) -> None:
        self.done = self.value = None
        self.after = []

    @property
    def is_released(self) -> bool:
        return self.done is None and self.value is None


def _nothing() -> None:
    pass
