"""Placement of workers: `ResourcePool` holds the processes on each node, `ResourcePoolManager` the pool of each role.

A pool is a plan; no process is started here.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import torch

from hybridflow.config.environment import wrong_variable
from hybridflow.errors import ConfigError
from hybridflow.runtime.user_code import did_you_mean


class Role(Enum):
    """The role of a worker group. The value is the name shown in logs and errors."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "reference"
    Teacher = "teacher"
    RewardModel = "reward_model"
    Reward = "reward"


class ResourcePool:
    """A pool of `process_on_nodes[i]` processes on node i, ranks numbered node by node.

    `max_colocate_count`: how many worker groups may each have a process at every place of the pool; a backend that
    reserves devices reserves this many shares per place. `environment`: further environment variables of the processes,
    which have them when the worker classes are imported and constructed. Raises ConfigError for an empty pool, an empty
    node, and a variable that the backend sets itself.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        max_colocate_count: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        counts = list(process_on_nodes) if isinstance(process_on_nodes, Iterable) else []
        if not counts or not all(isinstance(count, int) and count > 0 for count in counts):
            raise ConfigError(
                f"process_on_nodes={process_on_nodes!r} is invalid: expected at least one node, with at least one "
                f"process on each, e.g. [4, 4]."
            )
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count={max_colocate_count} is invalid: expected 1 or more worker groups.")
        if problem := wrong_variable(environment or {}):
            raise ConfigError(f"environment: {problem}.")
        self.process_on_nodes, self.environment = counts, dict(environment or {})
        self.use_gpu, self.max_colocate_count = use_gpu, max_colocate_count
        self._places = [(node, local_rank) for node, count in enumerate(counts) for local_rank in range(count)]

    @property
    def world_size(self) -> int:
        """The number of processes in the pool."""
        return len(self._places)

    def node(self, rank: int) -> int:
        """Return the index of the node of a rank."""
        return self._places[rank][0]

    def local_rank(self, rank: int) -> int:
        """Return the index of a rank on its node."""
        return self._places[rank][1]

    def local_world_size(self, rank: int) -> int:
        """Return the number of processes on the node of a rank."""
        return self.process_on_nodes[self.node(rank)]

    def __repr__(self) -> str:
        return f"ResourcePool(process_on_nodes={self.process_on_nodes}, use_gpu={self.use_gpu})"


class ResourcePoolManager:
    """The pools by name, and the pool of each role.

    `resource_pool_spec`: pool name -> processes on each node. `mapping`: role -> pool name; optional with a single
    pool, which then serves every role. `gpus_on_nodes`: available GPUs per node, by default the GPUs that this process
    sees; a pool of CPU processes always fits. Raises ConfigError, before any process starts, if a pool is not defined
    or does not fit.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role, str] | None = None,
        use_gpu: bool = False,
        max_colocate_count: int = 1,
        gpus_on_nodes: Sequence[int] | None = None,
    ) -> None:
        if not resource_pool_spec:
            raise ConfigError("resource_pool_spec is empty; name at least one pool, e.g. {'global_pool': [1]}.")
        if mapping is None:
            if len(resource_pool_spec) > 1:
                raise ConfigError(
                    f"mapping is missing, but there are several pools ({', '.join(resource_pool_spec)}); map each role "
                    f"to a pool."
                )
            mapping = dict.fromkeys(Role, next(iter(resource_pool_spec)))
        for role, pool_name in mapping.items():
            if pool_name not in resource_pool_spec:
                raise ConfigError(
                    f"mapping: {pool_name!r}, the pool of {role}, is not a defined pool"
                    f"{did_you_mean([pool_name], resource_pool_spec)}; defined pools: {', '.join(resource_pool_spec)}."
                )
        self.resource_pool_spec, self.mapping = dict(resource_pool_spec), dict(mapping)
        self.resource_pools = {
            name: ResourcePool(process_on_nodes, use_gpu=use_gpu, max_colocate_count=max_colocate_count)
            for name, process_on_nodes in resource_pool_spec.items()
        }
        if use_gpu:
            self._check_fit(list(gpus_on_nodes) if gpus_on_nodes is not None else [torch.cuda.device_count()])

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """Return the pool of a role. Raises ConfigError if the role has no pool."""
        if role not in self.mapping:
            raise ConfigError(f"{role} has no resource pool; roles with one: {', '.join(map(str, self.mapping))}.")
        return self.resource_pools[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of GPUs of all pools together."""
        return sum(pool.world_size for pool in self.resource_pools.values() if pool.use_gpu)

    def _check_fit(self, gpus_on_nodes: list[int]) -> None:
        """Place the largest counts first, each on the node with the most GPUs left that its pool does not use yet."""
        left = list(gpus_on_nodes)
        for name, pool in sorted(self.resource_pools.items(), key=lambda item: -max(item[1].process_on_nodes)):
            free_nodes = sorted(range(len(left)), key=lambda node: -left[node])
            for count, node in zip(sorted(pool.process_on_nodes, reverse=True), free_nodes, strict=False):
                left[node] -= count
            if len(pool.process_on_nodes) > len(left) or min(left) < 0:
                requested = ", ".join(f"{key}={value.process_on_nodes}" for key, value in self.resource_pools.items())
                raise ConfigError(
                    f"resource pool {name!r} does not fit: requested one GPU per process, {requested} (processes on "
                    f"each node); the nodes have {gpus_on_nodes} GPUs. Use fewer processes, or use_gpu=False."
                )
