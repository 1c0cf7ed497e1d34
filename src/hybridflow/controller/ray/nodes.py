"""Which nodes the processes of a pool go to. Pure: numbers in, numbers out; Ray is asked and told elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridflow.errors import ConfigError

Resources = Mapping[str, float]

EPSILON = 1e-6
"""Ray counts shares of a CPU in ten-thousandths."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster. `free` is what nobody has reserved, `total` what it has."""

    node_id: str
    address: str
    free: Resources
    total: Resources

    def holds(self, processes: int, share: Resources, *, empty: bool = False) -> bool:
        """Whether so many processes of that share fit; `empty`: if nobody else were there."""
        have = self.total if empty else self.free
        return all(have.get(name, 0.0) + EPSILON >= processes * amount for name, amount in share.items())

    def without(self, processes: int, share: Resources) -> "Node":
        """The node when so many processes of that share are there."""
        free = {name: amount - processes * share.get(name, 0.0) for name, amount in self.free.items()}
        return replace(self, free=free)


def sorted_nodes(nodes: Sequence[Node]) -> list[Node]:
    """By address, IPv4 as numbers: the same order after a restart of the cluster, whatever the ids of its nodes."""
    return sorted(nodes, key=lambda node: (_numbers(node.address), node.address, node.node_id))


def _numbers(address: str) -> list[int]:
    parts = address.split(".")
    return [int(part) for part in parts] if all(part.isdigit() for part in parts) else []


def choose_nodes(
    process_on_nodes: Sequence[int], share: Resources, nodes: Sequence[Node], *, empty: bool = False
) -> list[Node] | None:
    """A node of its own for each entry: the first in order that leaves a place for every later entry; None if they do
    not fit. `share` is what one process asks for."""
    chosen: list[Node] = []
    left = sorted_nodes(nodes)
    for index, processes in enumerate(process_on_nodes):
        later = process_on_nodes[index + 1 :]
        for node in left:
            others = [other for other in left if other is not node]
            if node.holds(processes, share, empty=empty) and _all_fit(later, share, others, empty):
                chosen.append(node)
                left = others
                break
        else:
            return None
    return chosen


def _all_fit(process_on_nodes: Sequence[int], share: Resources, nodes: Sequence[Node], empty: bool) -> bool:
    """Nodes are worse or better alike for all entries, so the largest entry may take the best node, and so on."""
    capacity = sorted((_capacity(node, share, empty) for node in nodes), reverse=True)
    wishes = sorted(process_on_nodes, reverse=True)
    return len(wishes) <= len(capacity) and all(c >= w for c, w in zip(capacity, wishes, strict=False))


def _capacity(node: Node, share: Resources, empty: bool) -> int:
    have = node.total if empty else node.free
    return min(
        (int((have.get(name, 0.0) + EPSILON) / amount) for name, amount in share.items() if amount), default=10**9
    )


def does_not_fit(what: str, process_on_nodes: Sequence[int], share: Resources, nodes: Sequence[Node]) -> ConfigError:
    """The error that says what was asked and what there is."""
    asked = ", ".join(f"{amount:g} {name}" for name, amount in share.items() if amount)
    there = "; ".join(
        f"{node.address}: "
        + ", ".join(f"{node.free.get(n, 0.0):g} of {node.total.get(n, 0.0):g} {n} free" for n in share)
        for node in sorted_nodes(nodes)
    )
    return ConfigError(
        f"{what} does not fit the cluster: asked for processes on {len(process_on_nodes)} node(s), "
        f"{list(process_on_nodes)} of them, each with {asked or 'nothing'}; the cluster has {len(nodes)} node(s): "
        f"{there or 'none'}. Ask for fewer processes or a smaller share (controller.cpus_per_worker; cpus_per_process "
        f"of a pool), add nodes, or wait until others release theirs (shutdown() of a group)."
    )
