"""Workloads of generation: prompts of random tokens, and the length of each response. Fixed by seeds."""

import random
import statistics
from dataclasses import dataclass

from support.models import MODELS

PROMPT_LEN = 20
LONG, SHARE_OF_LONG, MEDIAN = 256, 0.1, 32
"""The long tail: tokens of the longest responses, their share, the median length of all."""


@dataclass(frozen=True)
class Workload:
    """Prompts of PROMPT_LEN token ids each, and in `new_tokens` the exact length of each response."""

    name: str
    model: str
    prompts: list[list[int]]
    new_tokens: list[int]


def build_workload(name: str) -> Workload:
    """Build one of WORKLOADS."""
    return WORKLOADS[name](name)


def draw_prompts(model: str, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Draw (count, length) random token ids of a model, without 0, the padding token."""
    rng = random.Random(seed)
    return [[rng.randrange(1, MODELS[model]["vocab_size"]) for _ in range(length)] for _ in range(count)]


def long_tail(count: int, seed: int = 0) -> list[int]:
    """Draw response lengths in random order: half of them 8 to 32, one in ten 256, the others 32 to 64; median 32."""
    rng = random.Random(seed)
    num_short, num_long = count // 2, round(SHARE_OF_LONG * count)
    lengths = [MEDIAN, *(rng.randint(MEDIAN // 4, MEDIAN) for _ in range(num_short - 1))]
    lengths += [MEDIAN, *(rng.randint(MEDIAN, 2 * MEDIAN) for _ in range(count - num_short - num_long - 1))]
    lengths += [LONG] * num_long
    rng.shuffle(lengths)
    if statistics.median(lengths) != MEDIAN:
        raise ValueError(
            f"count={count} is invalid: the median is {statistics.median(lengths)}; use an even count above 4."
        )
    return lengths


def _small(name: str) -> Workload:
    return Workload(name, "small", draw_prompts("small", 256, PROMPT_LEN), [64] * 256)


def _long_tail(name: str) -> Workload:
    return Workload(name, "small", draw_prompts("small", 256, PROMPT_LEN), long_tail(256))


def _100m(name: str) -> Workload:
    return Workload(name, "100M", draw_prompts("100M", 64, PROMPT_LEN), [32] * 64)


def _tiny(name: str) -> Workload:
    return Workload(name, "small", draw_prompts("small", 4, PROMPT_LEN), [2, 4, 4, 4])


WORKLOADS = {"small": _small, "long_tail": _long_tail, "100M": _100m, "tiny": _tiny}
MEASURED = ("small", "long_tail", "100M")
"""The workloads of a full run; `tiny` is for smoke runs."""
