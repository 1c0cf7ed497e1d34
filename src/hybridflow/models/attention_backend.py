"""The choice of the implementation that computes attention; docs/gpu-attention.md has it as a table.

It knows what each implementation supports, not how it is called. The numbers of heads do not matter: every
implementation supports key-value heads that are shared by query heads.
"""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hybridflow.models.kernels.library import serves
from hybridflow.runtime.observe import get_logger

AttentionName = Literal["cpu_kernel", "varlen", "flex", "sdpa"]
"""The compiled CPU kernel, `torch.nn.attention.varlen`, `torch.nn.attention.flex_attention`, or PyTorch's
`scaled_dot_product_attention`."""

MAX_HEAD_DIM = 256
"""Largest head dimension of flash attention, and of FlexAttention here."""

HALF = (torch.bfloat16, torch.float16)
FLASH_CAPABILITIES = ((8, 0), (12, 1))
"""The first and the last compute capability of flash attention in PyTorch."""

WITHOUT_BACKWARD_OF_224 = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
"""Compute capabilities whose flash attention has no backward pass for head dimensions above 192 up to 224."""

logger = get_logger(__name__)


@dataclass(frozen=True)
class AttentionCase:
    """The properties of an attention call that decide which implementation computes it.

    `has_kernel`: whether compiled CPU kernels support device and dtype. `capability`: compute capability of a CUDA
    device, otherwise None. `has_triton`: whether FlexAttention can be compiled for a CUDA device.
    """

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    has_gradient: bool
    has_kernel: bool = False
    capability: tuple[int, int] | None = None
    has_triton: bool = False

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> "AttentionCase":
        """Describe the call with these tensors, whose last dimension is head_dim, head_dim and value_dim."""
        has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        is_cuda = query.device.type == "cuda"
        return cls(
            query.dtype,
            query.shape[-1],
            value.shape[-1],
            has_gradient,
            has_kernel=serves(query),
            capability=capability_of(query.device) if is_cuda else None,
            has_triton=is_cuda and has_triton(),
        )

    @classmethod
    def of_model(cls, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> "AttentionCase":
        """Describe the training calls of a model on a device."""
        text = config.get_text_config()
        head_dim = getattr(text, "head_dim", None)
        if head_dim is None:  # 0, which only the CPU supports, if the configuration has other names
            head_dim = getattr(text, "hidden_size", 0) // getattr(text, "num_attention_heads", 1)
        like = torch.empty(0, head_dim, dtype=dtype, device=device, requires_grad=True)
        return cls.of(like, like, like)


def attention_for(case: AttentionCase, *, shares_prompts: bool) -> AttentionName:
    """Return the implementation for packed rows, or for packed rows that share prompts."""
    if case.has_kernel and case.head_dim == case.value_dim:
        return "cpu_kernel"
    if shares_prompts:
        return "flex" if supports_flex(case) else "sdpa"
    return "varlen" if supports_flash(case) else "sdpa"


def supports_flash(case: AttentionCase) -> bool:
    """Whether flash attention computes this call, forward and backward: on Ampere or newer GPUs, in half precision."""
    if case.capability is None or case.dtype not in HALF:
        return False
    if not FLASH_CAPABILITIES[0] <= case.capability <= FLASH_CAPABILITIES[1]:
        return False
    lacks_backward = any(first <= case.capability <= last for first, last in WITHOUT_BACKWARD_OF_224)
    if case.has_gradient and lacks_backward and 192 < case.head_dim <= 224:
        return False
    return case.head_dim == case.value_dim <= MAX_HEAD_DIM and case.head_dim % 8 == 0


def supports_flex(case: AttentionCase) -> bool:
    """Whether FlexAttention computes this call: on Ampere or newer GPUs, in half precision, compiled by Triton."""
    if case.capability is None or case.capability < (8, 0) or not case.has_triton or case.dtype not in HALF:
        return False
    return min(case.head_dim, case.value_dim) >= 16 and max(case.head_dim, case.value_dim) <= MAX_HEAD_DIM


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, such as (9, 0)."""
    return torch.cuda.get_device_capability(device)


@cache
def has_triton() -> bool:
    """Whether Triton and the C compiler that it calls are installed; one warning if not."""
    has_compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if find_spec("triton") and has_compiler:
        return True
    missing = "a C compiler" if find_spec("triton") else "Triton"
    logger.warning(
        "%s is not installed: attention with shared prompts uses PyTorch's slower attention. Install gcc and the CUDA "
        "build of PyTorch, which includes Triton.",
        missing,
    )
    return False
