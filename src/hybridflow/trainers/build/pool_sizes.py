"""The number of processes of each pool of a run, which changes as nodes are lost and come back.

placement.pools = {rollout = [1, 1, 1]}     a node is lost      it is back
placement.min_processes = {rollout = 1}     [1, 1, 1] ──> [1, 1] ──> [1, 1, 1]

New processes of a pool start with a recovery, from the state at the begin of a step. So every prompt is used once, in
the same order, and the loss is that of the whole batch as before; its sums over ranks are rounded differently.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridflow.config import Config
from hybridflow.config.checks import contradictions
from hybridflow.config.roles import pools_of
from hybridflow.controller import Backend, Role, WorkerGroup, move_colocated
from hybridflow.errors import ConfigError, LostWorkerError
from hybridflow.runtime.observe import get_logger
from hybridflow.trainers.build.groups import as_ray, build_pool, meshes_of, roles_of_pools
from hybridflow.trainers.run.rank_speeds import measured_shares
from hybridflow.trainers.run.speed import measured_speedometer
from hybridflow.trainers.run.trainer import Trainer

if TYPE_CHECKING:
    from hybridflow.controller.ray import RayBackend, RayResourcePool

logger = get_logger(__name__)

Processes = tuple[int, ...]


class PoolSizes:
    """The pools of `roles` as they are now. `config`: the configuration of the run with these pools."""

    def __init__(self, config: Config, backend: "RayBackend", roles: Sequence[Role]) -> None:
        self.config, self._backend = config, backend
        self._roles_of = roles_of_pools(config, roles)
        self._wanted = {name: pools_of(config)[name] for name in self._roles_of}
        fewest = config.placement.min_processes
        self._shapes = {
            name: [
                shape
                for shape in shapes_of(processes, fewest[name])
                if not contradictions(with_pool(config, name, shape))
            ]
            if name in fewest
            else [processes]
            for name, processes in self._wanted.items()
        }

    def fit(self) -> Config:
        """Return the configuration with the pools that fit the cluster now. Raises ConfigError if they do not fit."""
        options = [[self._build(name, shape) for shape in shapes] for name, shapes in self._shapes.items()]
        for name, pool in zip(self._shapes, self._backend.choose_fitting(options), strict=True):
            self._note(name, tuple(pool.process_on_nodes))
        return self.config

    def refit(self, groups: Mapping[Role, WorkerGroup], names: Sequence[str]) -> list[str]:
        """Give the named groups, which need new processes, pools that fit the cluster now.

        Returns the names of those that have new processes; the others keep their number of ranks. Raises
        LostWorkerError if not even the fewest processes fit.
        """
        pools = [pool for pool, roles in self._roles_of.items() if any(role.value in names for role in roles)]
        if all(len(self._shapes[pool]) == 1 for pool in pools):
            return []
        options = [[self._build(pool, shape) for shape in self._shapes[pool]] for pool in pools]
        workers: list[Any] = [worker for name in names for worker in groups[Role(name)].workers]
        moved: list[str] = []
        for pool, chosen in zip(pools, self._backend.choose_fitting(options, instead_of=workers), strict=True):
            if tuple(chosen.process_on_nodes) == pools_of(self.config)[pool]:
                continue
            of_pool = {role.value: groups[role] for role in self._roles_of[pool]}
            changed = with_pool(self.config, pool, tuple(chosen.process_on_nodes))
            try:
                move_colocated(of_pool, chosen, self._backend, meshes_of(changed, of_pool))
            except ConfigError as error:  # they did fit, but another node has died or another program took the place
                raise LostWorkerError(f"the places of pool {pool} are gone again: {error}") from error
            self._note(pool, tuple(chosen.process_on_nodes))
            moved += of_pool
        return moved

    def growable(self, groups: Mapping[Role, WorkerGroup]) -> list[str]:
        """Return the names of groups for which the cluster has room for more of their processes."""
        from hybridflow.controller.ray.resource_pool import has_room

        names: list[str] = []
        for pool, shapes in self._shapes.items():
            roles = self._roles_of[pool]
            larger = shapes[: shapes.index(pools_of(self.config)[pool])]
            now: Any = groups[roles[0]].resource_pool
            if any(has_room(self._build(pool, shape), now) for shape in larger):
                names += [role.value for role in roles]
        return names

    def metrics(self) -> dict[str, float]:
        """Return `processes/<pool>` of the pools whose size may change."""
        now = pools_of(self.config)
        return {f"processes/{pool}": float(sum(now[pool])) for pool in self._shapes if len(self._shapes[pool]) > 1}

    def _build(self, name: str, processes: Processes) -> "RayResourcePool":
        pool: Any = build_pool(self.config, self._backend, name, processes, self._roles_of[name])
        return pool

    def _note(self, name: str, processes: Processes) -> None:
        before, wanted = pools_of(self.config)[name], self._wanted[name]
        self.config = with_pool(self.config, name, processes)
        if processes != before:
            logger.warning(
                "pool %s: %d of %d processes (%s on its nodes) from now on",
                name,
                sum(processes),
                sum(wanted),
                ", ".join(map(str, processes)),
            )


def use_sizes(trainer: Trainer, config: Config) -> None:
    """Let a trainer use the pools of this configuration, which its groups have already."""
    groups = trainer.groups
    trainer.speedometer = measured_speedometer(config, trainer.speedometer.learners, groups)
    trainer.rank_speeds = measured_shares(config, groups)
    trainer.config = config  # last: after an error of a rank that is measured, all of this is done again


def shapes_of(processes: Processes, fewest: int) -> list[Processes]:
    """Return the processes on each node that a pool may have, the most first; `fewest`: at least so many in all.

    They have fewer nodes, or fewer processes on the nodes with most: [4, 4] may become [3, 3], [4], [2, 2], and so on.
    """
    shapes = {
        tuple(min(count, most) for count in processes[:nodes])
        for nodes in range(1, len(processes) + 1)
        for most in range(1, max(processes) + 1)
    }
    return sorted((shape for shape in shapes if sum(shape) >= fewest), key=lambda shape: (-sum(shape), len(shape)))


def with_pool(config: Config, name: str, processes: Processes) -> Config:
    """Return the configuration with these processes of a pool."""
    if not config.placement.pools:
        return config.with_values("controller", num_workers=sum(processes))
    return config.with_values("placement", pools={**config.placement.pools, name: processes})


def pool_sizes_of(config: Config, backend: Backend, roles: Sequence[Role]) -> PoolSizes | None:
    """Return the pool sizes of a run, None if they are fixed."""
    return PoolSizes(config, as_ray(backend), roles) if config.placement.min_processes else None
