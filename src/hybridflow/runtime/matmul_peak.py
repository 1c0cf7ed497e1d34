"""What this machine's matrix product reaches: the denominator of a utilisation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def measure_peak_flops(dtype: torch.dtype, size: int = 1024, repeats: int = 12) -> float:
    """Floating-point operations per second of a square matrix product, the best of a few. Takes about 0.1 s."""
    import torch

    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds[1:])
