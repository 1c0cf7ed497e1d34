"""Statistics of the transfers in a trace: bytes and seconds of workers and nodes."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from hybridflow.runtime.observe.trace import Kind, TraceEvent

TRANSFERS: frozenset[Kind] = frozenset({"call", "send", "read"})
"""The kinds of events that move columns."""


def transfer_metrics(events: Iterable[TraceEvent]) -> dict[str, float]:
    """Return `transfer/...` of a step: bytes of the workers, bytes sent and read by the controller, and seconds."""
    events = [event for event in events if event.kind in TRANSFERS]
    calls = [event for event in events if event.kind == "call"]
    return {
        "transfer/bytes_flowed": sum(event.bytes_moved for event in calls),
        "transfer/bytes_sent": sum(event.bytes_out for event in events if event.kind == "send"),
        "transfer/bytes_read": sum(event.bytes_in for event in events if event.kind == "read"),
        "transfer/seconds": sum(_transfer_seconds(event) for event in events),
    }


def transfer_report(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """Return transfer statistics in total, per worker and per measured node.

    The keys are `total_transfer_time` (seconds), `total_data_transferred` (bytes), `average_throughput` (bytes/s);
    `workers`, each with `time`, `memory`, `data_size` and `throughput`; `nodes`, each with `latency` (seconds of a
    round trip) and `bandwidth` (bytes/s from the driver's store).
    """
    workers: dict[str, dict[str, float]] = {}
    events = list(events)
    for event in events:
        if event.kind not in TRANSFERS:
            continue
        entry = workers.setdefault(event.worker, {"time": 0.0, "memory": 0, "data_size": 0})
        entry["time"] += _transfer_seconds(event)
        entry["data_size"] += event.bytes_moved
        entry["memory"] = max(entry["memory"], event.memory_bytes)
    for entry in workers.values():
        entry["throughput"] = entry["data_size"] / entry["time"] if entry["time"] else 0.0
    seconds = sum(entry["time"] for entry in workers.values())
    size = sum(entry["data_size"] for entry in workers.values())
    return {
        "total_transfer_time": seconds,
        "total_data_transferred": size,
        "average_throughput": size / seconds if seconds else 0.0,
        "workers": dict(sorted(workers.items())),
        "nodes": _node_statistics([event for event in events if event.kind == "probe"]),
    }


def _node_statistics(probes: Sequence[TraceEvent]) -> dict[str, dict[str, float]]:
    """Return the median latency and bandwidth of each node."""
    statistics = {}
    for node in sorted({event.node for event in probes}):
        of_node = [event for event in probes if event.node == node]
        latencies = [event.end - event.start for event in of_node if not event.bytes_in]
        bandwidths = [event.bytes_in / max(event.end - event.start, 1e-9) for event in of_node if event.bytes_in]
        statistics[node] = {"latency": median(latencies), "bandwidth": median(bandwidths)}
    return statistics


def _transfer_seconds(event: TraceEvent) -> float:
    return event.transfer_s if event.kind == "call" else event.end - event.start
