"""`RayResourcePool`: the places of a pool on a Ray cluster, reserved together as one placement group."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridflow.controller.ray.nodes import EPSILON, Node, choose_nodes, does_not_fit
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import ConfigError, DispatchError
from hybridflow.runtime.observe import get_logger

logger = get_logger(__name__)

UNITS = 10_000
"""Ray's units in 1 of a resource."""

RESERVATION_TIMEOUT_S = 20.0
"""Seconds that the cluster may take to reserve resources that it reports as free."""

SETTLING_S = 5.0
"""Seconds that the cluster may take to report released resources as free."""


@dataclass(frozen=True)
class ReservedPlace:
    """The place of one rank: a bundle of a placement group, and its node."""

    group: PlacementGroup
    bundle: int
    node: Node


class RayResourcePool(ResourcePool):
    """A pool of `process_on_nodes[i]` processes on one node, each entry on a separate node, in order of node addresses.

    `use_gpu`: reserve a GPU for each place. `max_colocate_count`: how many worker groups may have a process at each
    place. `cpus_per_process`: logical CPUs reserved for each of these processes; may be a fraction, and does not limit
    the CPU use. `gpus_per_process`: with `use_gpu`, the share of a GPU of each place, so that other pools may use the
    rest of it. `name_prefix`: shown by Ray's tools. Resources are reserved when the first group is built on the pool.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str = "",
        max_colocate_count: int = 1,
        cpus_per_process: float = 1.0,
        gpus_per_process: float = 1.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(process_on_nodes, use_gpu, max_colocate_count, environment)
        if not cpus_per_process >= 0:
            raise ConfigError(
                f"cpus_per_process={cpus_per_process} is invalid: expected a number of logical CPUs, 0 or more."
            )
        if not 0 < gpus_per_process <= 1:
            raise ConfigError(
                f"gpus_per_process={gpus_per_process} is invalid: expected a share of a GPU, above 0 and at most 1."
            )
        self.name_prefix, self.cpus_per_process, self.gpus_per_process = name_prefix, cpus_per_process, gpus_per_process
        self._reserved: list[ReservedPlace] | None = None
        self._groups: list[PlacementGroup] = []
        self._tenants = [0] * self.world_size

    @property
    def share(self) -> dict[str, float]:
        """The resources that one place reserves, for `max_colocate_count` worker groups."""
        share = {"CPU": _in_units(self.cpus_per_process * self.max_colocate_count)}
        return share | {"GPU": _in_units(self.gpus_per_process)} if self.use_gpu else share

    @property
    def share_of_one_group(self) -> dict[str, float]:
        """The resources of one place that a process of one worker group uses."""
        share = {"CPU": _in_units(self.cpus_per_process)}
        return share | {"GPU": _in_units(self.gpus_per_process / self.max_colocate_count)} if self.use_gpu else share

    def places(self) -> list[ReservedPlace]:
        """Return the place of each rank; reserve the places first if needed.

        Raises ConfigError, within seconds, if the pool does not fit the free resources of the cluster.
        """
        if self._reserved is None:
            nodes = self._choose_nodes()
            bundles = [node for node, count in zip(nodes, self.process_on_nodes, strict=True) for _ in range(count)]
            self._reserved = self._reserve(bundles)
        return self._reserved

    def take_tenancy(self) -> None:
        """Count a worker group that is built on the pool. Raises ConfigError if the pool is full."""
        owned = self._owned()
        if any(pool._tenants[rank] >= self.max_colocate_count for pool, rank in owned):
            raise ConfigError(
                f"{self!r} already has max_colocate_count={self.max_colocate_count} worker group(s); raise "
                f"max_colocate_count, shut down a group, or fuse roles with create_colocated_worker_cls."
            )
        for pool, rank in owned:
            pool._tenants[rank] += 1

    def give_up_tenancy(self) -> None:
        """Count a worker group that was shut down; release the reservation after the last one."""
        for pool, rank in self._owned():
            pool._tenants[rank] -= 1
            if not any(pool._tenants):
                pool.release()

    def release(self) -> None:
        """Release the reserved resources of the pool."""
        self._reserved = None
        while self._groups:
            group = self._groups.pop()
            if ray.is_initialized():
                try:
                    remove_placement_group(group)
                except RayError as error:  # the reservation ends with this process
                    logger.warning("the cluster did not answer when %r gave back its places: %s", self, error)

    def _owned(self) -> "list[tuple[RayResourcePool, int]]":
        """Return each place as a rank of the pool that reserves it."""
        return [(self, rank) for rank in range(self.world_size)]

    def _choose_nodes(self) -> list[Node]:
        require_fit([self])
        chosen = choose_nodes(self.process_on_nodes, self.share, nodes := nodes_of_cluster())
        if chosen is None:  # the resources were taken just now
            raise does_not_fit(repr(self), self.process_on_nodes, self.share, nodes)
        return chosen

    def _reserve(self, nodes: Sequence[Node]) -> list[ReservedPlace]:
        group = placement_group(
            [{name: amount for name, amount in self.share.items() if amount} or {"memory": 1} for _ in nodes],
            strategy="PACK",
            name=self.name_prefix,
            bundle_label_selector=[{"ray.io/node-id": node.node_id} for node in nodes],
        )
        if not group.wait(RESERVATION_TIMEOUT_S):
            remove_placement_group(group)
            raise does_not_fit(repr(self), self.process_on_nodes, self.share, nodes_of_cluster())
        self._groups.append(group)
        return [ReservedPlace(group, index, node) for index, node in enumerate(nodes)]

    def __repr__(self) -> str:
        name = f"{self.name_prefix!r}, " if self.name_prefix else ""
        return f"RayResourcePool({name}process_on_nodes={self.process_on_nodes}, use_gpu={self.use_gpu})"


def _in_units(amount: float) -> float:
    """Return an amount of a resource rounded down to Ray's units of 0.0001, of which it accepts only multiples."""
    return math.floor(amount * UNITS + EPSILON) / UNITS


class _Part(RayResourcePool):
    """A pool made of places of other pools."""

    def __init__(self, process_on_nodes: Sequence[int], parts: Sequence[tuple[RayResourcePool, range]]) -> None:
        first = parts[0][0]
        of_place = (first.max_colocate_count, first.cpus_per_process, first.gpus_per_process)
        super().__init__(process_on_nodes, first.use_gpu, first.name_prefix, *of_place)
        self._parts = parts

    def places(self) -> list[ReservedPlace]:
        """Return the places in the other pools, reserved there if needed."""
        return [pool.places()[rank] for pool, ranks in self._parts for rank in ranks]

    def _owned(self) -> list[tuple[RayResourcePool, int]]:
        return [pool._owned()[rank] for pool, ranks in self._parts for rank in ranks]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Split a pool by rank into parts of `split_size` places each, or of the listed sizes.

    The parts share the reservation of the pool. Raises ConfigError if the sizes do not add up to the whole pool.
    """
    world_size = resource_pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (world_size // split_size) if split_size > 0 else []
    else:
        sizes = list(split_size)
    if sum(sizes) != world_size or any(size < 1 for size in sizes):
        raise ConfigError(
            f"split_size={split_size!r} is invalid for the {world_size} places of {resource_pool!r}; use a divisor of "
            f"{world_size}, or a list of positive numbers with sum {world_size}."
        )
    parts, start = [], 0
    for size in sizes:
        ranks = range(start, start + size)
        nodes = [resource_pool.node(rank) for rank in ranks]
        parts.append(_Part([nodes.count(node) for node in dict.fromkeys(nodes)], [(resource_pool, ranks)]))
        start += size
    return parts


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """Return a pool of the places of both pools, those of the first pool first; both reservations remain.

    Raises ConfigError if only one pool has GPUs, or if their shares differ.
    """
    if (first.share, first.max_colocate_count) != (second.share, second.max_colocate_count):
        raise ConfigError(
            f"merge_resource_pool: {first!r} reserves {first.share} per place for {first.max_colocate_count} group(s), "
            f"but {second!r} reserves {second.share} for {second.max_colocate_count}; make them equal."
        )
    ranks = [(pool, range(pool.world_size)) for pool in (first, second)]
    return _Part([*first.process_on_nodes, *second.process_on_nodes], ranks)


def require_fit(pools: Sequence[RayResourcePool]) -> None:
    """Raise ConfigError, within seconds, unless all pools together fit the cluster."""
    choose_fitting([[pool] for pool in pools])


def choose_fitting(options: Sequence[Sequence[RayResourcePool]], wait_s: float = SETTLING_S) -> list[RayResourcePool]:
    """Return one pool of each list such that all fit together: the earliest one of the first list, and so on.

    Waits up to `wait_s` seconds until the first ones fit, since resources that were released may not be free yet.
    Raises ConfigError if not even the last ones fit.
    """
    deadline = time.monotonic() + wait_s
    while True:
        nodes = nodes_of_cluster()
        first = [pools[0] for pools in options]
        if _first_problem(first, nodes, empty=False) is None:
            return first
        never_fits = all(len(pools) == 1 for pools in options) and _first_problem(first, nodes, empty=True) is not None
        if never_fits or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    chosen = [pools[-1] for pools in options]
    if problem := _first_problem(chosen, nodes, empty=False):
        raise problem
    for index, pools in enumerate(options):
        for pool in pools:
            chosen[index] = pool
            if _first_problem(chosen, nodes, empty=False) is None:
                break
    return chosen


def has_room(pool: RayResourcePool, instead_of: RayResourcePool) -> bool:
    """Return whether a pool would fit the cluster if the places of another one, which are reserved, were free."""
    own = [place.node.node_id for place in instead_of.places()]
    nodes = [node.without(-own.count(node.node_id), instead_of.share) for node in nodes_of_cluster()]
    return choose_nodes(pool.process_on_nodes, pool.share, nodes) is not None


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
    """Return the living nodes of the cluster to which this process is connected."""
    from ray._private.state import available_resources_per_node

    if not ray.is_initialized():
        raise DispatchError(
            "this process is not connected to a Ray cluster; build the worker group on a RayBackend, or call ray.init."
        )
    free: dict[str, Any] = available_resources_per_node()
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {}), node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
