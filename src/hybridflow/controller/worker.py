"""`Worker`: one rank of an SPMD program. It learns who it is from the standard environment variables and
knows nothing of groups, dispatch or the backend that runs it.
"""

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from hybridflow.errors import DispatchError, WorkerError

# Set by a backend that runs several ranks of a group in one process, one after another.
RANKS_TAKE_TURNS = "HYBRIDFLOW_RANKS_TAKE_TURNS"


class Worker:
    """Base class of all workers. `super().__init__()` need not be called.

    Outside a worker group and outside `torchrun`, a worker is rank 0 of 1.

    `concurrent_calls`: how many calls a process of the class runs at the same time, where the backend has a process for
    each rank. With the usual 1 they run on the main thread, one after another, as collectives need it. A class that
    mostly waits for others (rewards from a service, a server) may set more: each call has a thread of its own, the
    class must bear that, and its ranks cannot meet in collectives.
    """

    concurrent_calls: ClassVar[int] = 1

    _rank: int
    _world_size: int
    _local_rank: int
    _local_world_size: int
    _ranks_take_turns: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        self = super().__new__(cls)
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._ranks_take_turns = RANKS_TAKE_TURNS in os.environ
        return self

    @property
    def rank(self) -> int:
        """This worker's number in its group, 0 to world_size - 1."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Workers in the group."""
        return self._world_size

    @property
    def local_rank(self) -> int:
        """This worker's number on its node: the device it uses."""
        return self._local_rank

    @property
    def local_world_size(self) -> int:
        """Workers of the group on this node."""
        return self._local_world_size

    @property
    def has_collectives(self) -> bool:
        """Whether the ranks of the group can meet: not where they take turns in a process, or calls are concurrent."""
        return not self._ranks_take_turns and self.concurrent_calls == 1

    def require_collectives(self, reason: str) -> None:
        """Call this before the first collective of a method (or of the constructor).

        Raises WorkerError where ranks cannot meet because they take turns in one process (the local backend
        with several ranks) or because calls run in threads: the collective would wait for ever, or meet the wrong one.
        `reason` says what it is for.
        """
        if self.concurrent_calls != 1:
            why = (
                f"runs {self.concurrent_calls} calls at the same time, in no order that the ranks share; use "
                f"concurrent_calls = 1."
            )
        elif self._ranks_take_turns:
            why = (
                "the local backend runs ranks one after another, so they cannot meet; use one worker "
                "(process_on_nodes=[1]), or a backend with one process per rank."
            )
        else:
            return
        raise WorkerError(
            f"{type(self).__name__} needs a collective over its {self.world_size} ranks ({reason}), but {why}",
            role=type(self).__name__,
            rank=self.rank,
        )


def concurrent_calls_of(classes: Mapping[str, type]) -> int:
    """Of a process that holds these roles. Raises DispatchError for roles that cannot share one."""
    wanted = {name: getattr(cls, "concurrent_calls", 1) for name, cls in classes.items()}
    for name, calls in wanted.items():
        if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
            raise DispatchError(f"{classes[name].__name__}.concurrent_calls={calls!r}: needs an integer of 1 or more.")
        if calls > 1 and len(wanted) > 1:
            raise DispatchError(
                f"{name!r} runs {calls} calls at the same time and {', '.join(repr(n) for n in wanted if n != name)} "
                f"would share its process, whose calls must take turns; give {name!r} a pool of its own."
            )
    return max(wanted.values(), default=1)
