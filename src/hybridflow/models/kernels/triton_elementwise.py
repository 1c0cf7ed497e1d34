"""Triton kernels of the RMS norm, the rotary embedding and the gated activation, each in one pass, without gradient.

A decoding step on a GPU is bound by memory and by the number of its kernels; PyTorch's operations would be five to
eight kernels each. The formulas and the rounding are those of `hybridflow.models.kernels.elementwise`.
"""

# PyTorch for CUDA brings Triton, PyTorch for CPUs does not.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridflow.models.kernels.triton_support import aligned

BLOCK = 1024
"""Numbers of a gated activation in one program."""


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute `rms_norm`; x (..., width)."""
    x, width = aligned(x), x.shape[-1]
    out = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(width)
        _norm[(x.numel() // width,)](x, aligned(weight), out, width, float(epsilon), BLOCK=block)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `rotary`; x (tokens, heads, dim), cos and sin (tokens, dim / 2) float32."""
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _rotate[(tokens, heads)](
            *(x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), dim // 2),
            BLOCK=triton.next_power_of_2(dim // 2),
        )
    return out


def multiply_gated(gates: Tensor, up: Tensor) -> Tensor:
    """Compute `silu_mul` of tensors of one shape."""
    gates, up = gates.contiguous(), up.contiguous()
    out = torch.empty_like(gates)
    if size := gates.numel():
        _multiply_gated[(triton.cdiv(size, BLOCK),)](gates, up, out, size, BLOCK=BLOCK)
    return out


@triton.jit
def _norm(x, weight, out, width, epsilon, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_valid = i < width
    wide = tl.load(x + row * width + i, mask=is_valid, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    kind = out.dtype.element_ty
    normed = (wide * factor).to(kind).to(tl.float32)
    scale = tl.load(weight + i, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, (normed * scale).to(kind), mask=is_valid)


@triton.jit
def _rotate(x, cos, sin, out, token_stride, head_stride, half, BLOCK: tl.constexpr):
    token, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    is_valid = i < half
    source = x + token * token_stride + head * head_stride + i
    first = tl.load(source, mask=is_valid, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_valid, other=0.0).to(tl.float32)
    c = tl.load(cos + token * half + i, mask=is_valid, other=0.0)
    s = tl.load(sin + token * half + i, mask=is_valid, other=0.0)
    target = out + (token * tl.num_programs(1) + head) * 2 * half + i
    kind = out.dtype.element_ty
    tl.store(target, (first * c - second * s).to(kind), mask=is_valid)
    tl.store(target + half, (second * c + first * s).to(kind), mask=is_valid)


@triton.jit
def _multiply_gated(gates, up, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = i < size
    wide = tl.load(gates + i, mask=is_valid, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    activated = (wide / (1.0 + tl.exp(-wide))).to(kind).to(tl.float32)
    factor = tl.load(up + i, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(out + i, (activated * factor).to(kind), mask=is_valid)
