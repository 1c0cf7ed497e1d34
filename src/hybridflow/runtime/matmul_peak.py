"""The matrix-product rate of this machine: the denominator of model FLOPs utilization (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PRODUCTS_PER_ROUND = 4
PAUSE_S = 0.05


def measure_peak_flops(
    dtype: torch.dtype,
    size: int = 1024,
    rounds: int = 5,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return the floating-point operations per second of the fastest square matrix product in several rounds.

    The pauses between the rounds keep a short load on the machine from lowering the result. Takes about 0.5 s.
    """
    import torch

    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    fastest_s = float("inf")
    for index in range(rounds * PRODUCTS_PER_ROUND):
        if index and index % PRODUCTS_PER_ROUND == 0:
            sleep(PAUSE_S)
        start = clock()
        torch.mm(a, b)
        fastest_s = min(fastest_s, clock() - start)
    return 2 * size**3 / fastest_s
