"""The worker groups of a run, some of which get new processes after a failure."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridflow.controller import WorkerGroup

if TYPE_CHECKING:
    from hybridflow.controller.ray import RayBackend

SETTLE_TIMEOUT_S = 60.0
"""Seconds in which groups that did not fail finish their calls; after that their processes are replaced too."""


class RestartedGroups:
    """The groups of a run by name. `connected`: whether the groups hold connections to each other or run in parallel.

    Then one group cannot go on without the others, and all get new processes. `standby`: whether processes wait to
    replace those of the groups. `move(names)`: replaces the processes of those of the groups whose number of ranks has
    to change, and returns their names; None: it never changes.
    """

    def __init__(
        self,
        backend: "RayBackend",
        groups: Mapping[str, WorkerGroup],
        *,
        connected: bool,
        standby: bool = False,
        move: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        self._backend, self._groups, self._connected, self._standby = backend, dict(groups), connected, standby
        self._move = move

    @property
    def _workers(self) -> list[Any]:
        return [worker for group in self._groups.values() for worker in group.workers]

    def keep_standbys(self) -> None:
        """Start the standbys that are missing, if the groups have any."""
        if self._standby:
            self._backend.keep_standbys(self._workers)

    def settle(self, also: Sequence[str] = ()) -> list[str]:
        """Wait until no call is unfinished; return the names of the groups that need new processes.

        `also`: groups that need new processes although they have not failed.
        """
        failed = set(map(id, self._backend.settle(self._workers, SETTLE_TIMEOUT_S)))
        if (failed or also) and self._connected:
            return list(self._groups)
        of_groups = {name: set(map(id, group.workers)) for name, group in self._groups.items()}
        return [name for name, workers in of_groups.items() if name in also or not failed.isdisjoint(workers)]

    def restart(self, names: Sequence[str]) -> None:
        """Start new processes for the named groups; let the others discard what the unfinished step has left."""
        moved = self._move(names) if self._move else ()
        rest = [name for name in names if name not in moved]
        workers: list[Any] = [worker for name in rest for worker in self._groups[name].workers]
        self._backend.restart(workers)
        for name, group in self._groups.items():
            if name not in names and "abandon_step" in group.methods:
                group.abandon_step()
