"""Builds the backend, the resource pools and the worker groups of a run from its configuration."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, cast

from hybridflow.config import Config
from hybridflow.config.roles import ROLES, RoleTraits, pool_of, pools_of, ranks_of
from hybridflow.controller import (
    Backend,
    ClassWithInitArgs,
    LocalBackend,
    ResourcePool,
    Role,
    WorkerGroup,
    spawn_colocated,
)
from hybridflow.controller.mesh import ROLLOUT_MESH
from hybridflow.runtime.observe import TraceEvent, get_logger, stage_seconds, transfer_metrics
from hybridflow.runtime.observe.timing import STAGES

if TYPE_CHECKING:
    from hybridflow.controller.ray import RayBackend

logger = get_logger(__name__)

MOST_NAMED = 8
"""Workers that the log of the start names."""


def build_backend(config: Config) -> Backend:
    """Build the local backend, or the Ray backend, which connects to its cluster when the first group starts."""
    controller = config.controller
    if controller.backend == "local":
        return LocalBackend()
    from hybridflow.controller.ray import RayBackend

    num_places = sum(sum(processes) for processes in pools_of(config).values())
    return RayBackend(
        controller.address,
        num_cpus=max(1.0, num_places * controller.cpus_per_worker),
        object_store_bytes=controller.object_store_bytes or None,
        call_timeout_s=controller.call_timeout_s,
        heartbeat_timeout_s=controller.heartbeat_timeout_s,
        report_after_s=controller.report_after_s,
        threads=controller.threads,
        compress=controller.compress_transfers,
    )


def as_ray(backend: Backend | None) -> "RayBackend":
    """Return the backend of a run on Ray as what it is."""
    return cast("RayBackend", backend)


class BackendOwner:
    """Base class of programs that stop their workers: use it as a context manager, or call `close`."""

    events: list[TraceEvent] = []  # noqa: RUF012  (replaced, never mutated)

    backend: Backend | None = None

    def trace_metrics(self) -> dict[str, float]:
        """Return times and transfers since the last call; append the trace events to `events`, for the log."""
        events = self.backend.trace.take() if self.backend else []
        self.events = [*self.events, *events]
        return {**stage_seconds(events, STAGES), **transfer_metrics(events)}

    def take_events(self) -> list[TraceEvent]:
        """Return the trace events since the last call and forget them."""
        self.trace_metrics()
        events, self.events = self.events, []
        return events

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, and the Ray cluster if the run started it."""
        if self.backend is not None:
            self.backend.close()


@contextmanager
def closing_on_error(backend: Backend) -> Iterator[Backend]:
    """Yield the backend; close it if the block raises."""
    try:
        yield backend
    except BaseException:
        backend.close()
        raise


def processes_of(config: Config, roles: Iterable[Role]) -> dict[str, tuple[str, int]]:
    """Return the pool of each role with its number of processes."""
    return {role.value: (pool_of(config, role.value), ranks_of(config, role.value)) for role in roles}


def traits_of(role: Role) -> RoleTraits:
    """Return the traits of a role in `ROLES`."""
    return ROLES[role.value]  # pyright: ignore[reportArgumentType]


def build_groups(
    config: Config, backend: Backend, classes: Mapping[Role, ClassWithInitArgs]
) -> dict[Role, WorkerGroup]:
    """Start a worker group for each role; roles of one pool share its processes.

    The backend checks that all pools fit before the first group starts.
    """
    roles_of, processes = roles_of_pools(config, classes), pools_of(config)
    pools = {name: build_pool(config, backend, name, processes[name], roles) for name, roles in roles_of.items()}
    if config.controller.backend == "ray":  # starting takes seconds
        logger.info("starting %d worker processes on Ray", sum(pool.world_size for pool in pools.values()))
    backend.check_fit(list(pools.values()))
    groups = spawn_groups(config, backend, classes, pools)
    if config.controller.backend == "ray":
        place_of = as_ray(backend).place_of
        workers = list(dict.fromkeys(place_of(worker) for group in groups.values() for worker in group.workers))
        more = f"; and {len(workers) - MOST_NAMED} more" if len(workers) > MOST_NAMED else ""
        logger.info("workers: %s%s", "; ".join(workers[:MOST_NAMED]), more)
    return groups


def roles_of_pools(config: Config, roles: Iterable[Role]) -> dict[str, list[Role]]:
    """Return the roles of each pool that has one."""
    of_pools: dict[str, list[Role]] = {name: [] for name in pools_of(config)}
    for role in roles:
        of_pools[pool_of(config, role.value)].append(role)
    return {name: found for name, found in of_pools.items() if found}


def spawn_groups(
    config: Config, backend: Backend, classes: Mapping[Role, ClassWithInitArgs], pools: Mapping[str, ResourcePool]
) -> dict[Role, WorkerGroup]:
    """Start a worker group for each role on its pool."""
    groups: dict[Role, WorkerGroup] = {}
    for name, roles in roles_of_pools(config, classes).items():
        by_name = {role.value: classes[role] for role in roles}
        on_pool = spawn_colocated(pools[name], by_name, backend, meshes_of(config, by_name))
        groups |= {role: on_pool[role.value] for role in roles}
    return groups


def meshes_of(config: Config, names: Iterable[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the device meshes of each group: `default` for training, `ROLLOUT_MESH` for generation."""
    parallel, meshes = config.parallel, {}
    for name in names:
        ranks = ranks_of(config, name)
        data = max(ranks // (parallel.sequence * parallel.tensor), 1)
        meshes[name] = {}
        fits = ranks % parallel.divisor[0] == 0
        if fits and traits_of(Role(name)).has_sharded_model(config):
            meshes[name]["default"] = {"data": data, "sequence": parallel.sequence, "tensor": parallel.tensor}
        tensor = config.rollout.tensor
        if name in (Role.ActorRollout.value, Role.Rollout.value) and ranks % tensor == 0:
            meshes[name][ROLLOUT_MESH] = {"data": ranks // tensor, "tensor": tensor}
    return meshes


def build_pool(
    config: Config, backend: Backend, name: str, processes: tuple[int, ...], roles: Sequence[Role]
) -> ResourcePool:
    """Build a pool for roles. On Ray each process with a model reserves a GPU, if the cluster has any."""
    if config.controller.backend == "local":
        return ResourcePool(processes, environment=config.controller.environment)
    from hybridflow.controller.ray import RayResourcePool

    has_model = any(traits_of(role).model(config) != "none" for role in roles)
    return RayResourcePool(
        processes,
        use_gpu=has_model and as_ray(backend).connection.has_gpus(),
        name_prefix=name,
        cpus_per_process=config.controller.cpus_per_worker,
        gpus_per_process=config.controller.gpus_per_worker,
        environment=config.controller.environment,
    )


def groups_of_pools(config: Config, groups: Mapping[Role, WorkerGroup], method: str) -> list[WorkerGroup]:
    """Return a group with this method for each pool, for what concerns processes: roles of one pool share them.

    With updates in flight the ranks that generate are left out: they would answer only after the batches that run.
    """
    of_pools: dict[int, WorkerGroup] = {}
    for role, group in groups.items():
        if method in group.methods and not (config.updates_in_flight and role is Role.Rollout):
            of_pools.setdefault(id(group.resource_pool), group)
    return list(of_pools.values())
