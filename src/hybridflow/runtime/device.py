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


def own_device() -> "torch.device":
    """Return the CUDA device of this local rank, or the CPU if there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
