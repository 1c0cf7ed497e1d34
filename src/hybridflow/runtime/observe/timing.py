"""Duration of stages as `timing_s/<stage>`, rates derived from it, and the idle share of processes."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from hybridflow.runtime.observe.trace import TraceEvent

STAGES = {
    "generate_sequences": "gen",
    "begin_sequences": "gen",
    "next_sequences": "gen",
    "update_actor_in_parts": "update_actor",
    "finish_sequences": "gen",
    "score": "reward",
    "begin_score": "reward",
    "finish_score": "reward",
    "sync_weights": "weight_sync",
    **dict.fromkeys(
        ("announce_weights", "join_receivers", "send_bucket", "compute_probe", "finish_sending"), "send_weights"
    ),
    **dict.fromkeys(
        ("join_sender", "start_receiving", "receive_bucket", "finish_receiving", "check_weights"), "receive_weights"
    ),
    "compute_log_probs": "old_log_probs",
    "compute_ref_log_probs": "ref_log_probs",
    "compute_teacher_log_probs": "teacher",
    "compute_values": "values",
    "generate_validation_sequences": "validation_gen",
    "score_validation": "validation_reward",
}
"""Stage of a worker's method in metrics, timelines and pages; that of any other method is its name."""

WEIGHT_SYNC = ("weight_sync", "send_weights", "receive_weights")
"""Stages of a weight sync."""


@contextmanager
def timed(
    stage: str, metrics: MutableMapping[str, Any], clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Add the seconds of the block to `metrics["timing_s/<stage>"]`, even if it raises."""
    name = f"timing_s/{stage}"
    start = clock()
    try:
        yield
    finally:
        metrics[name] = metrics.get(name, 0.0) + clock() - start


def tokens_per_s(metrics: Mapping[str, Any], num_tokens: Mapping[str, int]) -> dict[str, float]:
    """Return `perf/<stage>_tokens_per_s` of each timed stage in `num_tokens` (stage -> tokens it processed)."""
    return {
        f"perf/{stage}_tokens_per_s": count / seconds
        for stage, count in num_tokens.items()
        if (seconds := metrics.get(f"timing_s/{stage}"))
    }


def per_token_ms(metrics: Mapping[str, Any], num_tokens: Mapping[str, int]) -> dict[str, float]:
    """Return `timing_per_token_ms/<stage>` of each timed stage in `num_tokens` (stage -> tokens it processed)."""
    return {
        f"timing_per_token_ms/{stage}": 1000 * metrics[f"timing_s/{stage}"] / count
        for stage, count in num_tokens.items()
        if count and f"timing_s/{stage}" in metrics
    }


def idle_shares(
    events: Iterable[TraceEvent],
    running: Iterable[tuple[str, float]],
    roles: Mapping[str, tuple[str, int]],
    start: float,
    end: float,
) -> dict[str, float]:
    """Return `perf/<role>_idle_share`: the share of the time from `start` to `end` without a call, over processes.

    `running`: worker and start of each call that is not in `events` because it has not finished. `roles`: pool of each
    role and number of its processes; the roles of a pool share them. Times are seconds of `time.time()`.
    """
    calls = [(event.worker, event.start, event.end) for event in events if event.kind == "call"]
    spans: dict[str, dict[str, list[tuple[float, float]]]] = {pool: {} for pool, _ in roles.values()}
    for worker, begins, ends in [*calls, *((worker, since, end) for worker, since in running)]:
        role, _, rank = worker.rpartition("/")
        clipped = max(begins, start), min(ends, end)
        if role in roles and clipped[0] < clipped[1]:
            spans[roles[role][0]].setdefault(rank, []).append(clipped)
    busy_s = {pool: sum(map(union_seconds, of_process.values())) for pool, of_process in spans.items()}
    return {
        f"perf/{role}_idle_share": 1 - busy_s[pool] / (num_processes * (end - start))
        for role, (pool, num_processes) in roles.items()
    }


def stage_seconds(events: Iterable[TraceEvent], stages: Mapping[str, str]) -> dict[str, float]:
    """Return `timing_s/<stage>` of every called method: the time in which at least one rank ran it.

    `stages` maps a method to its stage if the names differ.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.kind == "call":
            spans.setdefault(stages.get(event.method, event.method), []).append((event.start, event.end))
    return {f"timing_s/{stage}": union_seconds(of_stage) for stage, of_stage in spans.items()}


def union_seconds(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of the spans in seconds."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return covered
