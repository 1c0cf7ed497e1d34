"""The matrix-product rate of a device: its peak, the denominator of model FLOPs utilization (MFU), and its rate now."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PRODUCTS_PER_ROUND = 4
CPU_SIZE, CPU_SIZE_OF_FEW_THREADS, GPU_SIZE = 1024, 512, 8192
MAX_FEW_THREADS = 8
PAUSE_S = 0.05
GPU_SIZE_OF_RATE = 2048


def peak_flops(dtype: torch.dtype) -> float:
    """Return the peak of this process on its device, measured once for each dtype and number of threads."""
    import torch

    from hybridflow.runtime.device import own_device

    return _peak_flops(dtype, own_device(), torch.get_num_threads())


@cache
def _peak_flops(dtype: torch.dtype, device: torch.device, num_threads: int) -> float:
    return measure_peak_flops(dtype, device=device)


def measure_peak_flops(
    dtype: torch.dtype,
    size: int = 0,
    rounds: int = 5,
    *,
    device: torch.device | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return the floating-point operations per second of the fastest square matrix product in several rounds.

    `size`: rows and columns of the matrices; 0: enough for the device, by default the CPU. The pauses between the
    rounds keep a short load on the machine from lowering the result. Takes about 0.3 s. A GPU multiplies random
    numbers: equal ones need less power, so that its clock is higher than for the products of a model.
    """
    import torch

    device = device or torch.device("cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else _return_at_once
    size = size or enough_for(device, torch.get_num_threads())
    a, b = (_matrix(size, dtype, device) for _ in range(2))
    fastest_s = float("inf")
    for index in range(rounds * PRODUCTS_PER_ROUND):
        if index and index % PRODUCTS_PER_ROUND == 0:
            sleep(PAUSE_S)
        wait()
        start = clock()
        torch.mm(a, b)
        wait()
        fastest_s = min(fastest_s, clock() - start)
    return 2 * size**3 / fastest_s


def measure_flops_now(
    dtype: torch.dtype,
    size: int = 0,
    *,
    period_s: float = 0.3,
    device: torch.device | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the floating-point operations per second of matrix products, one after another.

    The peak counts the fastest product, which may run undisturbed on a core that another program takes most of the
    time. The period is longer than the time slices of a scheduler, so that its rate includes these pauses. `size`: 0:
    enough for the device, by default that of this process, and on a GPU little, since its memory is in use. On a slow
    device the period is at least one product.
    """
    import torch

    from hybridflow.runtime.device import own_device

    device = device or own_device()
    is_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if is_gpu else _return_at_once
    size = size or (GPU_SIZE_OF_RATE if is_gpu else enough_for(device, torch.get_num_threads()))
    a, b = (_matrix(size, dtype, device) for _ in range(2))
    torch.mm(a, b)  # the first product also loads the kernel
    wait()
    start, count, passed_s = clock(), 0, 0.0
    while passed_s < period_s:
        torch.mm(a, b)
        wait()
        count, passed_s = count + 1, clock() - start
    return 2 * size**3 * count / passed_s


def enough_for(device: torch.device, num_threads: int) -> int:
    """Return the size of matrices whose product reaches the peak of a device; each product of a few threads is short.

    A short product often runs undisturbed on a busy machine.
    """
    if device.type == "cuda":
        return GPU_SIZE
    return CPU_SIZE_OF_FEW_THREADS if num_threads <= MAX_FEW_THREADS else CPU_SIZE


def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ones for a CPU, and random numbers for other devices, from a generator of its own."""
    import torch

    if device.type == "cpu":
        return torch.ones(size, size, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(size, size, dtype=dtype, device=device, generator=generator)


def _return_at_once() -> None:
    """Do nothing: operations of the CPU have finished when they return."""
