"""Times and rates of the device of this process."""

import time
from collections.abc import Callable

import torch

from hybridflow.runtime.device import own_device
from hybridflow.runtime.matmul_peak import peak_flops

GIB = 2**30
NOMINAL_FLOPS = 989e12
"""Dense bfloat16 FLOP/s that NVIDIA names for H100 SXM and H200; other frameworks report shares of it."""


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds of a call, until the device has finished."""
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def best_seconds(call: Callable[[], object], repeats: int, *, warm_ups: int = 1, calls: int = 1) -> float:
    """Return the least seconds of a call; each of `repeats` measurements has `calls` of them."""
    for _ in range(warm_ups):
        call()

    def several() -> None:
        for _ in range(calls):
            call()

    return min(seconds_of(several) for _ in range(repeats)) / calls


def wait() -> None:
    """Wait for the device."""
    if is_gpu():
        torch.cuda.synchronize()


def is_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return own_device().type == "cuda"


def product_flops() -> float:
    """Return the best FLOP/s of a bfloat16 product of random matrices, measured once in a process."""
    return peak_flops(torch.bfloat16)


def copy_bandwidth(repeats: int = 10) -> float:
    """Return the best bytes per second of a copy on the device, read and written bytes together."""
    device = own_device()
    source = torch.ones(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / best_seconds(lambda: target.copy_(source), repeats)


def peak_gib() -> float | None:
    """Return the peak of the device's memory; None on a CPU, where it is not measured."""
    return torch.cuda.max_memory_allocated() / GIB if is_gpu() else None
