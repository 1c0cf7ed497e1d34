"""The one decision where Triton kernels run: on CUDA devices, without gradient, where Triton is installed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DEVICE = "cuda"
"""The type of devices that Triton's kernels run on; its interpreter also computes on "cpu"."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_is_generating = ContextVar("_is_generating", default=False)


@contextmanager
def generation_kernels() -> Iterator[None]:
    """Use Triton kernels for elementwise operations within the context, which is for generation.

    Training does not use them, so that its passes with and without gradient have the same bits.
    """
    token = _is_generating.set(True)
    try:
        yield
    finally:
        _is_generating.reset(token)


def runs_triton(x: Tensor) -> bool:
    """Whether Triton kernels compute on tensors like `x`: on a CUDA device, without gradient, not in float64.

    Not within torch.compile, which makes its own kernels from PyTorch's operations.
    """
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled() and serves_triton(x)


def serves_triton(x: Tensor) -> bool:
    """Whether there are Triton kernels for tensors like `x`: on a CUDA device, not in float64."""
    return x.device.type == DEVICE and x.dtype in DTYPES and has_triton()


def aligned(x: Tensor) -> Tensor:
    """Return x contiguous at an address for which Triton compiles the same kernel; others may add in another order."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def runs_triton_elementwise(x: Tensor) -> bool:
    """Whether Triton kernels compute elementwise operations on `x`: where they run, in `generation_kernels()`."""
    return runs_triton(x) and _is_generating.get()


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None
