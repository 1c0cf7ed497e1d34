"""How many threads torch computes with, and whether it may use nondeterministic kernels.

Both reach the bits of a result: sums are split over threads.
"""

import os
from pathlib import Path

from hybridflow.errors import ConfigError

_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def set_num_threads(num_threads: int) -> int:
    """Let torch compute with this many threads, 0 being `count_physical_cores()`; returns the number now in use."""
    import torch

    if num_threads < 0:
        raise ConfigError(
            f"controller.threads={num_threads} is negative; use 0 for the number of physical cores, or 1, 2, ..."
        )
    torch.set_num_threads(num_threads or count_physical_cores())
    return torch.get_num_threads()


def count_physical_cores() -> int:
    """Physical cores this process may use: hyper-threads count once, affinity and a container's limit are respected."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = {_threads_of_core(cpu) for cpu in cpus}
    return max(1, min(len(cores), _container_limit(default=len(cpus))))


def set_deterministic(enabled: bool) -> None:
    """Only deterministic kernels from now on (an operation that has none raises), or any kernel again.

    New memory is not filled with NaN, torch's default in this mode: nothing here reads memory it has not written.
    Call it before the first CUDA operation, since cuBLAS reads its workspace setting once.
    """
    import torch
    import torch.utils.deterministic

    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _threads_of_core(cpu: int) -> str:
    """Which hardware threads share the core of `cpu`, as the kernel writes it; `cpu` itself where it does not say."""
    try:
        return (_CPU_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _container_limit(default: int) -> int:
    """Whole CPUs of the cgroup's quota ("200000 100000" is two)."""
    try:
        quota, period = _CPU_LIMIT.read_text().split()
    except (OSError, ValueError):
        return default
    return default if quota == "max" else int(quota) // int(period)
