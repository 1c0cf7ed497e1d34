"""Duration of stages as `timing_s/<stage>`, and rates derived from it."""

import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any


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
