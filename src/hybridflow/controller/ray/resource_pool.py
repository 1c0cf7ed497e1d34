"""`RayResourcePool`: the places of a pool on a Ray cluster, reserved as one placement group, all of it or nothing."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridflow.controller.ray.nodes import Node, choose_nodes, does_not_fit
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import ConfigError, DispatchError

RESERVATION_TIMEOUT_S = 20.0
"""How long resources may take to be reserved that are free as far as the cluster knows."""

SETTLING_S = 5.0
"""How long the cluster may take to notice that somebody has released resources."""


@dataclass(frozen=True)
class Place:
    """Where one rank lives: a bundle of a placement group, and the node it is on."""

    group: PlacementGroup
    bundle: int
    node: Node


class RayResourcePool(ResourcePool):
    """`process_on_nodes[i]` processes on one node, each entry on a node of its own, in order of the nodes' addresses.

    `use_gpu`: a GPU for each process. `max_colocate_count`: how many worker groups may have a process at each place.
    `cpus_per_process`: the share of logical CPUs that each of those takes; a fraction is fine, it reserves and does not
    limit. `name_prefix` is shown by Ray's tools. Nothing is reserved before the first group is built on the pool.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str = "",
        max_colocate_count: int = 1,
        cpus_per_process: float = 1.0,
    ) -> None:
        super().__init__(process_on_nodes, use_gpu=use_gpu, max_colocate_count=max_colocate_count)
        if not cpus_per_process >= 0:
            raise ConfigError(f"cpus_per_process={cpus_per_process}: needs a number of logical CPUs, 0 or more.")
        self.name_prefix, self.cpus_per_process = name_prefix, cpus_per_process
        self._reserved: list[Place] | None = None
        self._groups: list[PlacementGroup] = []
        self._tenants = [0] * self.world_size
        self._is_detached = False

    @property
    def share(self) -> dict[str, float]:
        """What one place reserves, for all worker groups that may come."""
        share = {"CPU": self.cpus_per_process * self.max_colocate_count}
        return share | {"GPU": 1.0} if self.use_gpu else share

    @property
    def share_of_one_group(self) -> dict[str, float]:
        """What a process of one worker group takes of its place."""
        share = {"CPU": self.cpus_per_process}
        return share | {"GPU": 1.0 / self.max_colocate_count} if self.use_gpu else share

    def places(self) -> list[Place]:
        """The place of each rank, reserved now if it is not yet.

        Raises ConfigError, within seconds, if the pool does not fit what the cluster has free.
        """
        if self._reserved is None:
            nodes = self._choose_nodes()
            bundles = [node for node, count in zip(nodes, self.process_on_nodes, strict=True) for _ in range(count)]
            self._reserved = self._reserve(bundles)
        return self._reserved

    def take_tenancy(self, detached: bool = False) -> None:
        """Count a worker group that is built on the pool; `detached`: the reservation must outlive this process.

        Raises ConfigError if there is no room for another, or a detached one comes to others.
        """
        owned = self._owned()
        if any(pool._tenants[rank] >= self.max_colocate_count for pool, rank in owned):
            raise ConfigError(
                f"{self!r} has room for max_colocate_count={self.max_colocate_count} worker group(s), which are there "
                f"already; raise max_colocate_count, shut one down, or fuse roles with create_colocated_worker_cls."
            )
        if any(pool._reserved is not None and pool._is_detached != detached for pool, _ in owned):
            raise ConfigError(
                f"{self!r} is reserved for groups that {'end with' if detached else 'outlive'} this process; give "
                f"{'a detached group' if detached else 'others'} a pool of {'its' if detached else 'their'} own."
            )
        for pool, rank in owned:
            pool._tenants[rank] += 1
            pool._is_detached = detached

    def give_up_tenancy(self) -> None:
        """A worker group has gone; with the last one goes the reservation."""
        for pool, rank in self._owned():
            pool._tenants[rank] -= 1
            if not any(pool._tenants):
                pool.release()

    def release(self) -> None:
        """Give the resources back to the cluster."""
        self._reserved = None
        while self._groups:
            group = self._groups.pop()
            if ray.is_initialized():
                remove_placement_group(group)

    def _owned(self) -> "list[tuple[RayResourcePool, int]]":
        """Each place, as a rank of the pool that has reserved it."""
        return [(self, rank) for rank in range(self.world_size)]

    def _choose_nodes(self) -> list[Node]:
        deadline = time.monotonic() + SETTLING_S
        while True:
            nodes = nodes_of_cluster()
            chosen = choose_nodes(self.process_on_nodes, self.share, nodes)
            if chosen is not None:
                return chosen
            never_fits = choose_nodes(self.process_on_nodes, self.share, nodes, empty=True) is None
            if never_fits or time.monotonic() > deadline:
                raise does_not_fit(repr(self), self.process_on_nodes, self.share, nodes)
            time.sleep(0.1)

    def _reserve(self, nodes: Sequence[Node]) -> list[Place]:
        group = placement_group(
            [{name: amount for name, amount in self.share.items() if amount} or {"memory": 1} for _ in nodes],
            strategy="PACK",
            name=self.name_prefix,
            lifetime="detached" if self._is_detached else None,
            bundle_label_selector=[{"ray.io/node-id": node.node_id} for node in nodes],
        )
        if not group.wait(RESERVATION_TIMEOUT_S):
            remove_placement_group(group)
            raise does_not_fit(repr(self), self.process_on_nodes, self.share, nodes_of_cluster())
        self._groups.append(group)
        return [Place(group, index, node) for index, node in enumerate(nodes)]

    def __repr__(self) -> str:
        name = f"{self.name_prefix!r}, " if self.name_prefix else ""
        return f"RayResourcePool({name}process_on_nodes={self.process_on_nodes}, use_gpu={self.use_gpu})"


class _Part(RayResourcePool):
    """Places that belong to other pools."""

    def __init__(self, process_on_nodes: Sequence[int], parts: Sequence[tuple[RayResourcePool, range]]) -> None:
        first = parts[0][0]
        super().__init__(
            process_on_nodes,
            use_gpu=first.use_gpu,
            name_prefix=first.name_prefix,
            max_colocate_count=first.max_colocate_count,
            cpus_per_process=first.cpus_per_process,
        )
        self._parts = parts

    def places(self) -> list[Place]:
        return [pool.places()[rank] for pool, ranks in self._parts for rank in ranks]

    def _owned(self) -> list[tuple[RayResourcePool, int]]:
        return [pool._owned()[rank] for pool, ranks in self._parts for rank in ranks]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """The pool in parts, by rank: of `split_size` places each, or of as many as each number says.

    The parts share the reservation of the pool. Raises ConfigError if they do not make up the whole.
    """
    world_size = resource_pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (world_size // split_size) if split_size > 0 else []
    else:
        sizes = list(split_size)
    if sum(sizes) != world_size or any(size < 1 for size in sizes):
        raise ConfigError(
            f"split_resource_pool: {split_size!r} does not make up the {world_size} places of {resource_pool!r}; use a "
            f"divisor of {world_size}, or a list of positive numbers whose sum it is."
        )
    parts, start = [], 0
    for size in sizes:
        ranks = range(start, start + size)
        nodes = [resource_pool.node(rank) for rank in ranks]
        parts.append(_Part([nodes.count(node) for node in dict.fromkeys(nodes)], [(resource_pool, ranks)]))
        start += size
    return parts


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """The places of both pools, those of the first before those of the second; they stay in their reservations.

    Raises ConfigError if one has GPUs and the other has not, or their shares differ.
    """
    if (first.share, first.max_colocate_count) != (second.share, second.max_colocate_count):
        raise ConfigError(
            f"merge_resource_pool: {first!r} has {first.share} for {first.max_colocate_count} group(s) at each place, "
            f"{second!r} has {second.share} for {second.max_colocate_count}; make them equal."
        )
    ranks = [(pool, range(pool.world_size)) for pool in (first, second)]
    return _Part([*first.process_on_nodes, *second.process_on_nodes], ranks)


def require_fit(pools: Sequence[RayResourcePool]) -> None:
    """Raise ConfigError, within seconds, unless all these pools fit the cluster together."""
    deadline = time.monotonic() + SETTLING_S
    while True:
        nodes = nodes_of_cluster()
        problems = [_first_problem(pools, nodes, empty) for empty in (False, True)]
        if problems[0] is None:
            return
        if problems[1] is not None or time.monotonic() > deadline:
            raise problems[0]
        time.sleep(0.1)


def _first_problem(pools: Sequence[RayResourcePool], nodes: list[Node], empty: bool) -> ConfigError | None:
    left = [replace(node, free=node.total) for node in nodes] if empty else nodes
    for pool in pools:
        chosen = choose_nodes(pool.process_on_nodes, pool.share, left)
        if chosen is None:
            return does_not_fit(repr(pool), pool.process_on_nodes, pool.share, left)
        taken = {node.node_id: count for node, count in zip(chosen, pool.process_on_nodes, strict=True)}
        left = [node.without(taken.get(node.node_id, 0), pool.share) for node in left]
    return None


def nodes_of_cluster() -> list[Node]:
    """The living nodes of the cluster this process is connected to."""
    from ray._private.state import available_resources_per_node

    if not ray.is_initialized():
        raise DispatchError("there is no Ray cluster; build the worker group on a RayBackend, or call ray.init first.")
    free: dict[str, Any] = available_resources_per_node()
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {}), node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
