"""Latency and bandwidth between the driver and each node: round trips of a call, and the transfer of an object."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from hybridflow.controller.ray.processes import RayProcess
from hybridflow.runtime.observe import Trace, TraceEvent

ROUND_TRIPS = 5
PROBE_BYTES = 8 * 2**20
WHERE = "WorkerProcess.take"


def probe_nodes(processes: Sequence[RayProcess], ask: Callable[..., list[Any]], trace: Trace) -> None:
    """Measure the node of each process, one after another so that measurements do not disturb each other.

    The trace gets events of the kind "probe". Without bytes: a call's round trip as the driver sees it. With bytes: the
    transfer of an object from the driver's store until the worker has a copy. `ask(processes, method, arguments)` calls
    a method of the processes.
    """
    for process in processes:
        node = process.home.hostname if process.home else ""
        for _ in range(ROUND_TRIPS):
            start = time.time()
            ask([process], "take", [([],)])
            trace.record(TraceEvent("probe", WHERE, process.label, node, start, time.time()))
        content = ray.put(np.zeros(PROBE_BYTES, np.uint8))
        ((start, end),) = ask([process], "take", [([content],)])  # Ray does not transfer an object inside a list
        trace.record(TraceEvent("probe", WHERE, process.label, node, start, end, bytes_in=PROBE_BYTES))
