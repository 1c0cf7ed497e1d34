"""What can be seen of a worker process from outside, from its own node or by somebody sent there."""

import contextlib
import socket
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.controller.ray.worker_process import Home
from hybridflow.runtime.process_address import ProcessAddress
from hybridflow.runtime.process_report import report_process

OBSERVER_TIMEOUT_S = 20.0
"""How long an observer on another node may take to start and to answer."""


def observe(home: Home) -> str:
    """A report of the process, as text; if nobody can look at it, why not."""
    if home.hostname == socket.gethostname():
        return _without_markers(str(report_process(home.address)))
    try:
        strategy = NodeAffinitySchedulingStrategy(home.node_id, soft=False)
        remote: Any = ray.remote(num_cpus=0, max_retries=0)(_report)
        ref = remote.options(scheduling_strategy=strategy).remote(home.address)
        return _without_markers(ray.get(ref, timeout=OBSERVER_TIMEOUT_S))
    except Exception as error:  # the node itself may be what is wrong; the error that is being told matters more
        with contextlib.suppress(Exception):
            return f"  nobody could look at it on node {home.node_address}: {type(error).__name__}: {error}".split(
                "\n"
            )[0]
        return "  nobody could look at it"


def _without_markers(text: str) -> str:
    """Without the lines by which Ray finds its way in a log."""
    return "\n".join(line for line in text.splitlines() if not line.strip().startswith((":job_id:", ":actor_name:")))


def _report(address: ProcessAddress) -> str:
    return str(report_process(address))
