"""The device that a process computes on."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def own_device() -> "torch.device":
    """A CUDA device if there are any, each local rank its own, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
