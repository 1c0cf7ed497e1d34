"""How far a node is from the driver: a call there and back, and the bytes a second that reach a worker."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from hybridflow.controller.ray.processes import RayProcess
from hybridflow.observability import Trace, TraceEvent

ROUND_TRIPS = 5
PROBE_BYTES = 8 * 2**20
WHERE = "WorkerProcess.take"


def probe_nodes(processes: Sequence[RayProcess], ask: Callable[..., list[Any]], trace: Trace) -> None:
    """Measure the node of each of these processes, one after another, so that none is in the way of another.

    The trace gets events of the kind "probe": without bytes a call there and back, as the driver sees it; with bytes an
    object of the driver's store, until the worker has a copy. `ask(processes, method, arguments)` calls them.
    """
    for process in processes:
        node = process.home.hostname if process.home else ""
        for _ in range(ROUND_TRIPS):
            start = time.time()
            ask([process], "take", [([],)])
            trace.record(TraceEvent("probe", WHERE, process.label, node, start, time.time()))
        content = ray.put(np.zeros(PROBE_BYTES, np.uint8))
        ((start, end),) = ask([process], "take", [([content],)])  # in a list, Ray leaves the object where it is
        trace.record(TraceEvent("probe", WHERE, process.label, node, start, end, bytes_in=PROBE_BYTES))
