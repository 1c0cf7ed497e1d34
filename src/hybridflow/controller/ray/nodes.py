"""The choice of nodes for the processes of a pool: pure functions, without calls to Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridflow.errors import ConfigError

Resources = Mapping[str, float]

EPSILON = 1e-6
"""Tolerance when resources are compared; Ray counts CPU shares in units of 1e-4."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster. `free`: resources that are not reserved. `total`: all its resources."""

    node_id: str
    address: str
    free: Resources
    total: Resources

    def capacity(self, share: Resources, *, empty: bool = False) -> int:
        """Return how many processes with this share each fit; `empty`: on an otherwise empty node."""
        have = self.total if empty else self.free
        places = (int((have.get(name, 0.0) + EPSILON) / amount) for name, amount in share.items() if amount)
        return min(places, default=10**9)

    def without(self, processes: int, share: Resources) -> "Node":
        """Return the node with the resources of `processes`, each with this share, taken from `free`.

        A negative number gives them back; Ray names no resource of which nothing is free.
        """
        free = {name: self.free.get(name, 0.0) - processes * share.get(name, 0.0) for name in {**self.free, **share}}
        return replace(self, free=free)


def sorted_nodes(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes sorted by address, IPv4 by number, so that a restart of the cluster keeps their order."""
    return sorted(nodes, key=lambda node: (_numbers(node.address), node.address, node.node_id))


def _numbers(address: str) -> list[int]:
    parts = address.split(".")
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else []


def choose_nodes(
    process_on_nodes: Sequence[int],
    share: Resources,
    nodes: Sequence[Node],
    *,
    empty: bool = False,
) -> list[Node] | None:
    """Return a separate node for each entry of `process_on_nodes`; None if they do not fit.

    Each entry gets the first node, in order of addresses, that leaves a node for every later entry. `share`: the
    resources of one process.
    """
    chosen = []
    left = sorted_nodes(nodes)
    for index, processes in enumerate(process_on_nodes):
        later = process_on_nodes[index + 1 :]
        for node in left:
            others = [other for other in left if other is not node]
            if node.capacity(share, empty=empty) >= processes and _all_fit(later, share, others, empty):
                chosen.append(node)
                left = others
                break
        else:
            return None
    return chosen


def _all_fit(process_on_nodes: Sequence[int], share: Resources, nodes: Sequence[Node], empty: bool) -> bool:
    """Return whether each entry fits a separate node: match the largest entry with the largest node, and so on."""
    capacity = sorted((node.capacity(share, empty=empty) for node in nodes), reverse=True)
    requested = sorted(process_on_nodes, reverse=True)
    return len(requested) <= len(capacity) and all(c >= r for c, r in zip(capacity, requested, strict=False))


def does_not_fit(what: str, process_on_nodes: Sequence[int], share: Resources, nodes: Sequence[Node]) -> ConfigError:
    """Return the error of a pool that does not fit, with the requested and the available resources."""
    requested = ", ".join(f"{amount:g} {name}" for name, amount in share.items() if amount)
    available = "; ".join(
        f"{node.address}: "
        + ", ".join(f"{node.free.get(n, 0.0):g} of {node.total.get(n, 0.0):g} {n} free" for n in share)
        for node in sorted_nodes(nodes)
    )
    keys = "controller.cpus_per_worker"
    if "GPU" in share:
        keys += ", controller.gpus_per_worker, of which each process needs all on one GPU"
    return ConfigError(
        f"{what} does not fit the cluster: requested {list(process_on_nodes)} processes on {len(process_on_nodes)} "
        f"node(s), each with {requested or 'no resources'}; the cluster has {len(nodes)} node(s): "
        f"{available or 'none'}. Use fewer processes or a smaller share ({keys}; "
        f"cpus_per_process of a pool), add nodes, or wait until other groups release resources (shutdown() of a group)."
    )
