"""`Worker`: one rank of an SPMD program. It learns who it is from the standard environment variables and
knows nothing of groups, dispatch or the backend that runs it.
"""

import os
from typing import Any, Self

from hybridflow.errors import WorkerError

# Set by a backend that runs several ranks of a group in one process, one after another.
RANKS_TAKE_TURNS = "HYBRIDFLOW_RANKS_TAKE_TURNS"


class Worker:
    """Base class of all workers. `super().__init__()` need not be called.

    Outside a worker group and outside `torchrun`, a worker is rank 0 of 1.
    """

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
        """Whether the ranks of the group can meet: False where they take turns in one process."""
        return not self._ranks_take_turns

    def require_collectives(self, reason: str) -> None:
        """Call this before the first collective of a method (or of the constructor).

        Raises WorkerError where ranks cannot meet because they take turns in one process (the local backend
        with several ranks): the collective would wait for ever. `reason` says what it is for.
        """
        if self._ranks_take_turns:
            raise WorkerError(
                f"{type(self).__name__} needs a collective over its {self.world_size} ranks ({reason}), but the local "
                f"backend runs ranks one after another, so they cannot meet; use one worker "
                f"(process_on_nodes=[1]), or a backend with one process per rank.",
                role=type(self).__name__,
                rank=self.rank,
            )
