"""`Worker`: one rank of an SPMD program.

It reads its rank from the standard environment variables. It does not know groups, dispatch modes or its backend.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from hybridflow.errors import WorkerError

# A backend sets it if it runs several ranks of a group in one process, one after another.
RANKS_TAKE_TURNS = "HYBRIDFLOW_RANKS_TAKE_TURNS"


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, or unset those of None; restore the previous values on exit."""
    previous = {name: os.environ.get(name) for name in values}
    try:
        _set(values)
        yield
    finally:
        _set(previous)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Worker:
    """Base class of all workers. `super().__init__()` need not be called.

    Outside a worker group and outside `torchrun`, a worker is rank 0 of 1.

    `concurrent_calls`: how many calls a process of the class runs at the same time, on a backend with one process per
    rank. With the default 1, calls run on the main thread, one after another, as collectives require. A class that
    mostly waits for I/O (rewards from a service, a server) may set more: each call then runs in its own thread, so the
    class must be thread-safe and cannot use collectives.

    `second_thread_methods`: names of registered methods whose calls run in a second thread, one after another, on a
    backend with one process per rank: they need not wait for earlier calls of other methods, which then run in one
    other thread. The class must be thread-safe between the two; these methods cannot use collectives of the group.
    """

    concurrent_calls: ClassVar[int] = 1
    second_thread_methods: ClassVar[frozenset[str]] = frozenset()
    colocated: Mapping[str, "Worker"] = {}
    """The workers of all groups in this process by group name, itself included; known once all are constructed."""

    rank: int
    """The rank of this worker in its group, 0 to world_size - 1."""
    world_size: int
    """The number of workers in the group."""
    local_rank: int
    """The index of this worker on its node, and of the device it uses."""
    local_world_size: int
    """The number of workers of the group on this node."""
    _ranks_take_turns: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the worker and set its rank from the environment variables."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        self = super().__new__(cls)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._ranks_take_turns = RANKS_TAKE_TURNS in os.environ
        return self

    @property
    def has_collectives(self) -> bool:
        """Whether the group can use collectives; False if ranks take turns in one process or calls are concurrent."""
        return not self._ranks_take_turns and self.concurrent_calls == 1

    def close(self) -> None:
        """Free what the process would keep of a worker that is stopped; called by a backend whose process goes on."""

    def require_collectives(self, reason: str) -> None:
        """Raise WorkerError if collectives are unavailable; call it before the first collective of a method.

        They are unavailable if several ranks run one after another in one process (the local backend), or if calls run
        in threads: the collective would block forever or match the wrong call. `reason`: the purpose of the collective.
        """
        if self.concurrent_calls != 1:
            why = (
                f"runs {self.concurrent_calls} calls at the same time, in an order that differs between ranks; use "
                f"concurrent_calls = 1."
            )
        elif self._ranks_take_turns:
            why = (
                "the local backend runs ranks one after another, so a collective would block forever; use one worker "
                "(process_on_nodes=[1]), or a backend with one process per rank."
            )
        else:
            return
        raise WorkerError(
            f"{type(self).__name__} needs a collective over its {self.world_size} ranks ({reason}), but {why}",
            role=type(self).__name__,
            rank=self.rank,
        )


def set_colocated(instances: Mapping[str, object]) -> None:
    """Set `colocated` of each Worker to all Workers by the names of their groups; one that is shut down leaves it."""
    workers = WeakValueDictionary({name: each for name, each in instances.items() if isinstance(each, Worker)})
    for worker in workers.values():
        worker.colocated = workers
