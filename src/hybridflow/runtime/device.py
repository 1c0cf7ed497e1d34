"""The device that a process computes on."""

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


def free_cached_memory() -> None:
    """Release the GPU memory that PyTorch caches; does nothing on a CPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


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


def gpu_has_bfloat16() -> bool | None:
    """Return whether the CUDA device of this process computes in bfloat16; None without a device."""
    import torch

    device = own_device()
    if device.type != "cuda":
        return None
    # It reads properties only: making the device current would take memory of it in a driver that does not compute.
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)


def preferred_dtype() -> Literal["bfloat16", "float32"]:
    """Return the fastest compute dtype of this process's device: bfloat16 on a GPU that has it, otherwise float32."""
    return "bfloat16" if gpu_has_bfloat16() else "float32"
