"""The links from the driver to the nodes of a cluster, measured before workers are placed: slow ones are used last."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.ray.nodes import Node

ROUND_TRIPS, TRANSFERS = 5, 3
LINK_BYTES = 8 * 2**20

TIMEOUT_S = 30.0
"""Seconds after which a node that has not answered counts as infinitely slow."""

TIMES_SLOWER = 3.0
"""A link is slow if its latency or its bandwidth is so many times worse than the median of the other nodes."""

LEAST_LATENCY_S = 0.005
"""A latency below is never slow: differences are noise there."""


@dataclass(frozen=True)
class Link:
    """The round trip of a call in seconds, and the transfer from the driver's store in bytes per second."""

    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{1000 * self.latency_s:.1f} ms, {self.bytes_per_s / 1e6:,.0f} MB/s"


NO_LINK = Link(float("inf"), 0.0)


def find_slow_links(links: Mapping[str, Link]) -> dict[str, Link]:
    """Return the links that are slow, compared with the other ones; none if there is only one."""
    slow = {}
    for node, link in links.items():
        others = [other for name, other in links.items() if name != node and other != NO_LINK]
        if not others:
            continue
        latency_s = max(LEAST_LATENCY_S, TIMES_SLOWER * median(other.latency_s for other in others))
        bytes_per_s = median(other.bytes_per_s for other in others) / TIMES_SLOWER
        if link.latency_s > latency_s or link.bytes_per_s < bytes_per_s:
            slow[node] = link
    return slow


def measure_links(nodes: Sequence[Node]) -> dict[str, Link]:
    """Return the link to each node that is not the driver's, by node id; the nodes are measured one after another."""
    own = ray.get_runtime_context().get_node_id()
    return {node.node_id: _measure(node.node_id) for node in nodes if node.node_id != own}


def _measure(node_id: str) -> Link:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    probe: Any = ray.remote(num_cpus=0, scheduling_strategy=here)(_Probe).remote()  # pyright: ignore
    try:
        ray.get(probe.take.remote([]), timeout=TIMEOUT_S)  # starts the process
        round_trips = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            ray.get(probe.take.remote([]), timeout=TIMEOUT_S)
            round_trips.append(time.perf_counter() - start)
        transfers = []
        for _ in range(TRANSFERS):  # Ray does not transfer an object inside a list
            content = ray.put(np.zeros(LINK_BYTES, np.uint8))
            transfers.append(float(ray.get(probe.take.remote([content]), timeout=TIMEOUT_S)))
        return Link(median(round_trips), LINK_BYTES / max(median(transfers), 1e-9))
    except RayError:  # it died, or did not answer in time
        return NO_LINK
    finally:
        ray.kill(probe)


class _Probe:
    """A process that reads objects."""

    def take(self, references: list[Any]) -> float:
        """Read the objects; return the seconds that it took."""
        start = time.perf_counter()
        ray.get(references)
        return time.perf_counter() - start
