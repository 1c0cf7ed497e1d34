"""How fast each rank of a run computes: the shares of the rows that it gets by it, and ranks that have become slow.

    all ranks of a pool multiply matrices at the same time ──┬── shares of the rows (`controller.parts = "measured"`)
                                                             └── ranks many times slower than their peers are named

The ranks of a sharded model wait for each other in every layer, so their calls take equally long, and the duration of a
call does not tell which rank is slow. A slow rank is alive and its numbers are right, so nothing is restarted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from hybridflow.config import Config
from hybridflow.config.roles import pool_of
from hybridflow.controller import Backend, Role, WorkerGroup
from hybridflow.controller.part_sizes import SteadyShares
from hybridflow.runtime.observe import TraceEvent, get_logger
from hybridflow.trainers.build.groups import STAGE_OF_WORKER_METHOD, groups_of_pools, traits_of
from hybridflow.trainers.run.trainer import Trainer

if TYPE_CHECKING:
    from hybridflow.controller.ray import RayBackend

logger = get_logger(__name__)

FIRST_STEPS = 4
"""Number of first steps after each of which the ranks are measured."""

COST, COST_WHEN_SLOW = 0.01, 0.05
"""Share of a run's time that measurements take; the second one while steps take SLOWER times the median of the last."""

SLOWER, NUM_STEPS = 1.2, 20

WHAT = "training"
"""The name of the calls with collectives in the log and in the trace."""


class RankSpeeds:
    """The shares of the ranks of `pools`: for each, the groups with sharded models on the same processes.

    `clock`: seconds, for the time that measurements take.
    """

    def __init__(
        self, config: Config, pools: Sequence[Sequence[WorkerGroup]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dtype, self._pools, self._clock = config.model.dtype, pools, clock
        self._num_measured, self._cost_s, self._measured_at = 0, 0.0, clock()
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        for groups in pools:
            shares = SteadyShares(groups[0].mesh().axes["data"])
            for group in groups:
                group.shares.of_ranks = shares

    def note_step(self, seconds: float) -> None:
        """Measure the ranks after a step if that is due, and change their shares if that saves time."""
        is_slow = bool(self._steps_s) and seconds > SLOWER * median(self._steps_s)
        self._steps_s.append(seconds)
        most = COST_WHEN_SLOW if is_slow else COST
        if self._num_measured >= FIRST_STEPS and self._cost_s > most * (self._clock() - self._measured_at):
            return
        start = self._clock()
        for groups in self._pools:
            self._measure(groups)
        self._measured_at = self._clock()
        self._num_measured, self._cost_s = self._num_measured + 1, self._measured_at - start

    def _measure(self, groups: Sequence[WorkerGroup]) -> None:
        first = groups[0]
        speeds: list[float] = first.measure_speed(self._dtype, periods=1)
        shares, part_of = first.shares.of_ranks, first.mesh().part_of_rank(("data",))
        if shares is None or min(speeds) <= 0:  # a rank without memory to measure
            return
        slowest = [min(speed for speed, of in zip(speeds, part_of, strict=True) if of == part) for part in set(part_of)]
        if shares.note([1 / speed for speed in slowest]):
            first.shares.record(WHAT, shares)


def measured_shares(config: Config, groups: Mapping[Role, WorkerGroup]) -> RankSpeeds | None:
    """Return the speeds of the ranks of a run; None with equal parts, and if no sharded model has several replicas."""
    if config.controller.parts != "measured":
        return None
    pools: dict[str, list[WorkerGroup]] = {}
    for role, group in groups.items():
        has_replicas = "measure_speed" in group.methods and group.mesh().axes.get("data", 1) > 1
        if has_replicas and traits_of(role).has_sharded_model(config):
            pools.setdefault(pool_of(config, role.value), []).append(group)
    return RankSpeeds(config, list(pools.values())) if pools else None


def part_metrics(groups: Mapping[Role, WorkerGroup]) -> dict[str, Any]:
    """Return `parts/<stage>`: the smallest part of the calls of a stage, relative to an equal one."""
    least: dict[str, float] = {}
    for group in groups.values():
        for method, share in group.shares.least().items():
            stage = STAGE_OF_WORKER_METHOD.get(method, method)
            least[stage] = min(share, least.get(stage, share))
    return {f"parts/{stage}": share for stage, share in least.items()}


Rank = tuple[str, int]
"""The name of a group, and a rank of it."""

FEWEST_STEPS, MOST_STEPS = 5, 20
"""Number of ordinary steps whose median is compared with a step to find slow ranks."""

STEPS_BETWEEN_PROBES = 10


class SlowRanks:
    """The ordinary durations of the steps of a run, and the ranks that are known to be slow.

    An episode of a rank begins when it is found slow, and ends with a step of ordinary duration, or when a later probe
    finds it no longer slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._ordinary_s: deque[float] = deque(maxlen=MOST_STEPS)
        self._last_probe: int | None = None
        self._probed_s = 0.0
        self._known: set[Rank] = set()

    def note_step(self, step: int, seconds: float) -> float | None:
        """Return how many times the median the step took if a probe is due: measure the ranks, call `note_probe`.

        Slow steps do not change the median, so that a rank that stays slow is not taken as ordinary.
        """
        times = seconds / median(self._ordinary_s) if len(self._ordinary_s) >= FEWEST_STEPS else 0.0
        if times < self._factor:
            self._ordinary_s.append(seconds)
            self._known.clear()
            return None
        if self._last_probe is not None and step < self._last_probe + STEPS_BETWEEN_PROBES:
            return None
        self._last_probe, self._probed_s = step, seconds
        return times

    def note_probe(self, slow: Iterable[Rank]) -> list[Rank]:
        """Note the ranks that the probe found slow; return those whose episode begins.

        If there are none, the step was long for another reason, such as longer responses, and counts as ordinary.
        """
        found = list(slow)
        begun = [rank for rank in found if rank not in self._known]
        self._known = set(found)
        if not found:
            self._ordinary_s.append(self._probed_s)
        return begun


def find_slow_ranks(speeds: Mapping[Rank, float], factor: float) -> dict[Rank, float]:
    """Return the ranks whose speed times `factor` is below the median of their peers, with their share of this median.

    The peers of a rank are the other ranks of its group: of two ranks, the slow one would halve a median of both. A
    rank without peers and a rank with speed 0, which was not measured, are left out.
    """
    slow: dict[Rank, float] = {}
    for (group, rank), speed in speeds.items():
        peers = [of for other, of in speeds.items() if other[0] == group and other[1] != rank and of > 0]
        if speed > 0 and peers and speed * factor < median(peers):
            slow[group, rank] = speed / median(peers)
    return slow


class SlowRankWatch:
    """The watch of one run over `groups`, one for each pool of processes: measures them after a slow step."""

    def __init__(self, trainer: Trainer, groups: Sequence[WorkerGroup], backend: "RayBackend") -> None:
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
                step,
                seconds,
                times,
                self._backend.place_of(worker),
                slow[rank],
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


def watch_slow_ranks(trainer: Trainer, groups: Mapping[Role, WorkerGroup], backend: Backend) -> SlowRankWatch | None:
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
