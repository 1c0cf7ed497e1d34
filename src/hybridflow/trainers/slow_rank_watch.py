"""The watch for ranks of a run that have become many times slower than their peers; see `SlowRanks`."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hybridflow.config import Config
from hybridflow.controller import Backend, Role, WorkerGroup
from hybridflow.fault_tolerance import Rank, SlowRanks, find_slow_ranks
from hybridflow.observability import TraceEvent, get_logger
from hybridflow.trainers.pool_groups import groups_of_pools

if TYPE_CHECKING:
    from hybridflow.controller.ray import RayBackend

logger = get_logger(__name__)


class Watched(Protocol):
    """A trainer whose ranks are watched."""

    config: Config
    events: list[TraceEvent]


class SlowRankWatch:
    """The watch of one run over `groups`, one for each pool of processes: measures them after a slow step."""

    def __init__(self, trainer: Watched, groups: Sequence[WorkerGroup], backend: "RayBackend") -> None:
        self._trainer, self._groups, self._backend = trainer, groups, backend
        self._factor = trainer.config.recovery.slow_factor
        self._slow_ranks = SlowRanks(self._factor)

    def note_step(self, step: int, seconds: float) -> dict[str, float]:
        """Measure the ranks if the step was slow, and name the slow ones; return `recovery/slow_ranks` if measured."""
        times = self._slow_ranks.note_step(step, seconds)
        if times is None:
            return {}
        start = time.time()
        if slow := self._measure():  # twice, since a short load on its core may slow a rank down too
            slow = {rank: share for rank, share in self._measure().items() if rank in slow}
        workers = {(group.name, rank): worker for group in self._groups for rank, worker in enumerate(group.workers)}
        for rank in self._slow_ranks.note_probe(slow):
            worker = workers[rank]
            (node,) = self._backend.hostnames([worker])
            event = TraceEvent("recovery", "slow", worker.name, node, start, time.time())
            self._trainer.events = [*self._trainer.events, event]
            logger.warning(
                "step %d took %.1f s, %.1f times the median; worker %s computes at %.2f of the speed of its peers; it "
                "is alive, so the run goes on: look at its node",
                *(step, seconds, times, self._backend.place_of(worker), slow[rank]),
            )
        if not slow:
            logger.info("step %d took %.1f s, %.1f times the median; no rank is slow", step, seconds, times)
        return {"recovery/slow_ranks": float(len(slow))}

    def _measure(self) -> dict[Rank, float]:
        """Measure all ranks; return the slow ones, see `find_slow_ranks`."""
        dtype = self._trainer.config.model.dtype
        of_groups = {group.name: group.measure_speed(dtype) for group in self._groups}
        speeds = {(name, rank): speed for name, ranks in of_groups.items() for rank, speed in enumerate(ranks)}
        return find_slow_ranks(speeds, self._factor)


def watch_slow_ranks(trainer: Watched, groups: Mapping[Role, WorkerGroup], backend: Backend) -> SlowRankWatch | None:
    """Return the watch of a run on Ray; None without ranks to measure, and with recovery.slow_factor = 0."""
    config = trainer.config
    if config.controller.backend != "ray" or not config.recovery.slow_factor:
        return None
    from hybridflow.controller.ray import RayBackend

    assert isinstance(backend, RayBackend)
    measured = groups_to_measure(config, groups)
    return SlowRankWatch(trainer, measured, backend) if measured else None


def groups_to_measure(config: Config, groups: Mapping[Role, WorkerGroup]) -> list[WorkerGroup]:
    """Return a group for each pool with models and several ranks, see `groups_of_pools`."""
    return [group for group in groups_of_pools(config, groups, "measure_speed") if group.world_size > 1]
