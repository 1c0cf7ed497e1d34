"""RMS norm, rotary embedding and the gated activation, each in one pass over memory, forward and backward."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from hybridflow.models.kernels.library import call, serves
from hybridflow.models.kernels.triton_support import runs_triton_elementwise

ROW_CHUNKS = 64
"""Number of partial sums of the gradient of a norm's weight; fixed, so that results do not depend on threads."""
WIDEST = 1 << 14
"""Largest width of the Triton kernel of the norm, which holds a row in the registers of one program."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + epsilon) over the last axis (Zhang and Sennrich, 2019); x (..., width)."""
    if serves(x) and weight.dtype == x.dtype and weight.shape == x.shape[-1:]:
        return _RMSNorm.apply(x, weight, epsilon) if torch.is_grad_enabled() else _normed(x, weight, epsilon)[1]
    if runs_triton_elementwise(x) and weight.dtype == x.dtype and x.shape[-1] <= WIDEST:
        from hybridflow.models.kernels.triton_elementwise import norm

        return norm(x, weight, epsilon)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + dim / 2) of x (tokens, heads, dim) by its angle (Su et al., 2021); contiguous.

    cos and sin: (tokens, dim / 2), float32, or float64 with x in float64.
    """
    if serves(x) and cos.dtype == sin.dtype == torch.float32:
        return _Rotary.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin, 1.0)
    if runs_triton_elementwise(x) and cos.dtype == sin.dtype == torch.float32:
        from hybridflow.models.kernels.triton_elementwise import rotate

        return rotate(x, cos, sin)
    first, second = x.to(cos.dtype).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer, 2020)."""
    if serves(gate) and gate.dtype == up.dtype and gate.shape == up.shape:
        return _SiluMul.apply(gate, up) if torch.is_grad_enabled() else _gated(gate, up)
    if runs_triton_elementwise(gate) and gate.dtype == up.dtype and gate.shape == up.shape:
        from hybridflow.models.kernels.triton_elementwise import multiply_gated

        return multiply_gated(gate, up)
    return silu(gate) * up


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x made contiguous, its norm, and the factor 1 / rms of each row."""
    x, weight = x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    out, inverse_rms = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    call("rms_norm", x.dtype, x, weight, out, inverse_rms, rows, width, float(epsilon))
    return x, out, inverse_rms


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    cos, sin = cos.contiguous(), sin.contiguous()
    call("rotary", x.dtype, x, out, cos, sin, *x.shape, x.stride(0), x.stride(1), direction)
    return out


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    if gate.dim() != 2 or gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    rows, width = gate.numel() // gate.shape[-1], gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype)
    call("silu_mul", gate.dtype, gate, up, out, rows, width, gate.stride(-2) if gate.dim() > 1 else width)
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon):
        x, out, inverse_rms = _normed(x, weight, epsilon)
        ctx.save_for_backward(x, weight.contiguous(), inverse_rms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, weight, inverse_rms = ctx.saved_tensors
        grad_out, grad_x = grad_out.contiguous(), torch.empty_like(x)
        width = x.shape[-1]
        partial = x.new_empty(ROW_CHUNKS, width, dtype=torch.float32)
        sizes = (x.numel() // width, width, ROW_CHUNKS)
        call("rms_norm_backward", x.dtype, grad_out, x, weight, inverse_rms, grad_x, partial, *sizes)
        return grad_x, partial.sum(0).to(weight.dtype), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        cos, sin = ctx.saved_tensors
        return _rotated(grad_out, cos, sin, -1.0), None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        call("silu_mul_backward", gate.dtype, grad_out.contiguous(), gate, up, grad_gate, grad_up, gate.numel())
        return grad_gate, grad_up
