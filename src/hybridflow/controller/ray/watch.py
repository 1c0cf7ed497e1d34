"""Reports of a worker process from outside, made on this node or by a Ray task on the node of the process."""

import contextlib
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.ray.worker_process import Home
from hybridflow.runtime.process_address import ProcessAddress
from hybridflow.runtime.process_report import report_process

OBSERVER_TIMEOUT_S = 20.0
"""Seconds for a report from another node, including the start of its task."""


def observe(home: Home) -> str:
    """Return a report of the process as text, or the reason why it could not be collected."""
    if home.hostname == socket.gethostname():
        return _without_markers(str(report_process(home.address)))
    try:
        strategy = NodeAffinitySchedulingStrategy(home.node_id, soft=False)
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(_report)
        ref = remote.options(scheduling_strategy=strategy).remote(home.address)
        return _without_markers(ray.get(ref, timeout=OBSERVER_TIMEOUT_S))
    except Exception as error:  # the node may have failed; the report must not hide the caller's error
        with contextlib.suppress(Exception):
            reason = f"{type(error).__name__}: {error}"
            return f"  could not collect a process report on node {home.node_address}: {reason}".split("\n")[0]
        return "  could not collect a process report"


def _without_markers(text: str) -> str:
    """Remove the marker lines that Ray writes into logs."""
    return "\n".join(line for line in text.splitlines() if not line.strip().startswith((":job_id:", ":actor_name:")))


def _report(address: ProcessAddress) -> str:
    return str(report_process(address))
