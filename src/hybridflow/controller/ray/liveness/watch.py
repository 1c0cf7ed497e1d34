"""Reports of a worker process from outside, made on this node or by a Ray task on the node of the process."""

import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.ray.processes import Home
from hybridflow.controller.worker_side import described
from hybridflow.runtime.process_address import ProcessAddress
from hybridflow.runtime.process_report import State, report_process

OBSERVER_TIMEOUT_S = 20.0
"""Seconds for a report from another node, including the start of its task."""


def observe(home: Home | None) -> str:
    """Return a report of the process as text, or the reason why it could not be collected."""
    return examine(home)[1]


def examine(home: Home | None) -> tuple[State, str]:
    """Return the state of the process, "unknown" if its node does not answer, and the report of `observe`."""
    if home is None:
        return "unknown", "  its process has not started"
    try:
        if home.hostname == socket.gethostname():
            state, text = _examine(home.address)
        else:
            strategy = NodeAffinitySchedulingStrategy(home.node_id, soft=False)
            remote: Any = ray.remote(num_cpus=0, max_retries=0)(_examine)
            ref = remote.options(scheduling_strategy=strategy).remote(home.address)
            state, text = ray.get(ref, timeout=OBSERVER_TIMEOUT_S)
    except Exception as error:  # the node may have failed; the report must not hide the caller's error
        text = f"  could not collect a process report on node {home.node_address}: {described(error)}"
        return "unknown", text.split("\n")[0]
    markers = (":job_id:", ":actor_name:")  # which Ray writes into logs
    return state, "\n".join(line for line in text.splitlines() if not line.strip().startswith(markers))


def _examine(address: ProcessAddress) -> tuple[State, str]:
    report = report_process(address)
    return report.state, str(report)
