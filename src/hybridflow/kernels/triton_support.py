"""The one decision where Triton kernels run: on CUDA devices, without gradient, where Triton is installed."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels compute on tensors like `x`: on a CUDA device, without gradient, not in float64.

    Not within torch.compile, which makes its own kernels from PyTorch's operations.
    """
    if not x.is_cuda or x.dtype not in DTYPES or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
