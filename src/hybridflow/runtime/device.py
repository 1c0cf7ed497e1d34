"""The device that a process computes on."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_cached_memory() -> None:
    """Release the GPU memory that PyTorch caches; does nothing on a CPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_device_memory(device: "torch.device") -> int:
    """Return the memory of a CUDA device that is free, in bytes, after releasing what PyTorch caches."""
    import torch

    free_cached_memory()
    return torch.cuda.mem_get_info(device)[0]


def use_own_device() -> None:
    """Make `own_device` the current CUDA device; without it, PyTorch takes the device with the index LOCAL_RANK.

    Call it before a device mesh or a process group is made. Does nothing without a CUDA device.
    """
    import torch

    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)


def own_device() -> "torch.device":
    """Return the CUDA device of this local rank, or the CPU if there is no CUDA device.

    A process that sees fewer devices than its node has ranks, as a Ray worker sees only its own, takes one of those.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
