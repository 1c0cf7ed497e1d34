"""Where workers will live: `ResourcePool` is processes on nodes, `ResourcePoolManager` gives each role its pool.
Pools are plans; nothing is started here.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence

import torch

from hybridflow.controller.roles import Role
from hybridflow.errors import ConfigError


class ResourcePool:
    """`process_on_nodes[i]` processes on node i, ranks numbered node by node.

    `max_colocate_count` is how many worker groups may keep a process at each place of the pool: backends that
    reserve devices reserve so many shares. Raises ConfigError for an empty pool or an empty node.
    """

    def __init__(self, process_on_nodes: Sequence[int], use_gpu: bool = False, max_colocate_count: int = 1) -> None:
        counts = list(process_on_nodes) if isinstance(process_on_nodes, Iterable) else []
        if not counts or not all(isinstance(count, int) and count > 0 for count in counts):
            raise ConfigError(
                f"process_on_nodes={process_on_nodes!r}: needs at least one process on each node, e.g. [4, 4]."
            )
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count={max_colocate_count}: at least one worker group must fit in a pool.")
        self.process_on_nodes = counts
        self.use_gpu, self.max_colocate_count = use_gpu, max_colocate_count
        self._places = [(node, local_rank) for node, count in enumerate(counts) for local_rank in range(count)]

    @property
    def world_size(self) -> int:
        """Processes in the pool."""
        return len(self._places)

    def node(self, rank: int) -> int:
        """The number of the node a rank is on."""
        return self._places[rank][0]

    def local_rank(self, rank: int) -> int:
        """A rank's number on its node."""
        return self._places[rank][1]

    def local_world_size(self, rank: int) -> int:
        """Processes on the node of a rank."""
        return self.process_on_nodes[self.node(rank)]

    def __repr__(self) -> str:
        return f"ResourcePool(process_on_nodes={self.process_on_nodes}, use_gpu={self.use_gpu})"


class ResourcePoolManager:
    """Pools by name, and the pool of each role.

    `resource_pool_spec`: pool name -> processes on each node. `mapping`: role -> pool name; left out, every role is
    on the one pool there is. `gpus_on_nodes`: what there is, by default the GPUs this process sees; a pool of CPU
    processes always fits. Raises ConfigError, before anything is started, for a pool that does not exist or fit.
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
                raise ConfigError(f"several pools ({', '.join(resource_pool_spec)}), but no mapping of roles to them.")
            mapping = dict.fromkeys(Role, next(iter(resource_pool_spec)))
        for role, pool_name in mapping.items():
            if pool_name not in resource_pool_spec:
                raise ConfigError(
                    f"mapping: {role} is on pool {pool_name!r}, which does not exist"
                    f"{_did_you_mean(pool_name, resource_pool_spec)}; pools: {', '.join(resource_pool_spec)}."
                )
        self.resource_pool_spec, self.mapping = dict(resource_pool_spec), dict(mapping)
        self.resource_pools = {
            name: ResourcePool(process_on_nodes, use_gpu=use_gpu, max_colocate_count=max_colocate_count)
            for name, process_on_nodes in resource_pool_spec.items()
        }
        if use_gpu:
            self._check_fit(list(gpus_on_nodes) if gpus_on_nodes is not None else [torch.cuda.device_count()])

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role. Raises ConfigError if the role has none."""
        if role not in self.mapping:
            raise ConfigError(f"{role} has no resource pool; roles with one: {', '.join(map(str, self.mapping))}.")
        return self.resource_pools[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """GPUs of all pools together."""
        return sum(pool.world_size for pool in self.resource_pools.values() if pool.use_gpu)

    def _check_fit(self, gpus_on_nodes: list[int]) -> None:
        """Place the largest wishes first, each on the node with the most GPUs left that its pool does not use yet."""
        left = list(gpus_on_nodes)
        for name, pool in sorted(self.resource_pools.items(), key=lambda item: -max(item[1].process_on_nodes)):
            free_nodes = sorted(range(len(left)), key=lambda node: -left[node])
            for count, node in zip(sorted(pool.process_on_nodes, reverse=True), free_nodes, strict=False):
                left[node] -= count
            if len(pool.process_on_nodes) > len(left) or min(left) < 0:
                asked = ", ".join(f"{key}={value.process_on_nodes}" for key, value in self.resource_pools.items())
                raise ConfigError(
                    f"resource pool {name!r} does not fit: asked for one GPU per process, {asked} (processes on each "
                    f"node); there are {gpus_on_nodes} GPUs on the nodes. Ask for fewer processes, or use_gpu=False."
                )


def _did_you_mean(name: str, names: Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
