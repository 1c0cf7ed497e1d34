"""How fast each rank of a run computes, and the shares of the rows that it gets: `controller.parts = "measured"`.

All ranks of a pool multiply matrices at the same time. The ranks of a sharded model wait for each other in every layer,
so their calls take equally long, and the duration of a call does not tell which rank is slow.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from hybridflow.config import Config
from hybridflow.config.roles import pool_of
from hybridflow.controller import Role, WorkerGroup
from hybridflow.controller.part_sizes import SteadyShares
from hybridflow.runtime.observe.timing import STAGES
from hybridflow.trainers.build.groups import traits_of

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
        speeds: list[float] = first.measure_speed(self._dtype)
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
            stage = STAGES.get(method, method)
            least[stage] = min(share, least.get(stage, share))
    return {f"parts/{stage}": share for stage, share in least.items()}
