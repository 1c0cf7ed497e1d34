"""The number of threads of torch, whether it may use nondeterministic kernels, and the precision of its products.

All affect the bits of a result; sums are split over threads.
"""

import os
from pathlib import Path

from hybridflow.errors import ConfigError

_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def set_num_threads(num_threads: int) -> int:
    """Set the number of torch threads (0: `count_physical_cores()`) and return it."""
    import torch

    if num_threads < 0:
        raise ConfigError(
            f"controller.threads={num_threads} is invalid: must be at least 0; "
            "use 0 for the number of physical cores, or 1, 2, ..."
        )
    torch.set_num_threads(num_threads or count_physical_cores())
    return torch.get_num_threads()


def count_physical_cores() -> int:
    """Return the number of physical cores this process may use, by its affinity and the limit of its container."""
    cpus = os.sched_getaffinity(0)
    cores = {_threads_of_core(cpu) for cpu in cpus}
    return max(1, min(len(cores), _container_limit(default=len(cpus))))


def set_deterministic(enabled: bool) -> None:
    """Allow only deterministic kernels (an operation without one raises), or all kernels again.

    New memory is not filled with NaN, torch's default in this mode, since no code here reads uninitialized memory. Call
    it before the first CUDA operation, since cuBLAS reads its workspace setting once.
    """
    import torch
    import torch.utils.deterministic

    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def _threads_of_core(cpu: int) -> str:
    """Return the hardware threads of the core of `cpu` as the kernel lists them, or `cpu` if it does not."""
    try:
        return (_CPU_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _container_limit(default: int) -> int:
    """Return the whole CPUs of the cgroup's quota ("200000 100000" is two), or `default` without a quota."""
    try:
        quota, period = _CPU_LIMIT.read_text().split()
    except (OSError, ValueError):
        return default
    return default if quota == "max" else int(quota) // int(period)


def use_full_float32() -> None:
    """Compute float32 matrix products in float32 on every device, never in TF32, whose mantissa has 10 bits.

    A run that wants the speed of tensor cores computes in bfloat16 (`model.dtype`); what stays float32 there, such as
    rotary angles, needs the precision: TF32 would round positions above 2,048. It also undoes TF32 that a library or
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE enabled.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
