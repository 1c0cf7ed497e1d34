"""Attention where PyTorch's own is slow on a CPU: one new token for each row, and many short sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridflow.errors import ModelError
from hybridflow.kernels.library import call


def append_and_attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, ends: Tensor, longest: int, scaling: float
) -> Tensor:
    """Put each row's new key and value at its end in the cache, then attend to all that it holds.

    query (rows, heads, dim); key and value (rows, kv_heads, dim), where kv_heads divides heads; keys and values
    (at least rows, kv_heads, capacity, dim), contiguous, are written; ends (rows,) int64 are the tokens a row held
    before, at most `longest`. Returns (rows, heads, dim). Only for tensors that `serves` approves; no gradient.
    """
    rows, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    query, key, value = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (query, key, value))
    out = torch.empty(query.shape, dtype=query.dtype)
    sizes = (rows, heads, kv_heads, dim, capacity, longest + 1, query.stride(0), key.stride(0), value.stride(0))
    call("append_and_attend", query.dtype, query, key, value, keys, values, ends, out, *sizes, float(scaling))
    return out


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, families: Sequence[Sequence[int]], scaling: float
) -> Tensor:
    """Causal attention within sequences that lie one after another, where families of them share a beginning.

    A family lists lengths: of a trunk, then of branches, each of which goes on where the trunk ends and sees no other
    branch; `[[length], ...]` are plain sequences. query (tokens, heads, dim); key and value (tokens, kv_heads, dim),
    where kv_heads divides heads; the lengths, each at least 1, add up to tokens. Returns (tokens, heads, dim),
    differentiable. Time is quadratic in the lengths without the blocking that long sequences want. Only for tensors
    that `serves` approves.
    """
    starts = torch.tensor([0, *(length for family in families for length in family)]).cumsum(0)
    family_starts = torch.tensor([0, *map(len, families)]).cumsum(0)
    if int(starts[-1]) != len(query) or int(starts.diff().min()) < 1:
        raise ModelError(f"the lengths add up to {int(starts[-1])} tokens of {len(query)}; each must be at least 1.")
    longest = max(family[0] + max(family[1:], default=0) for family in families)
    return _CausalAttention.apply(query, key, value, starts, family_starts, longest, float(scaling))


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, starts, family_starts, longest, scaling):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        tokens, heads, dim = query.shape
        out, log_normaliser = torch.empty_like(query), query.new_empty(tokens, heads, dtype=torch.float32)
        ctx.places = (starts, family_starts)
        ctx.sizes = (len(family_starts) - 1, heads, key.shape[1], dim, longest, scaling)
        call("causal_attention", query.dtype, query, key, value, out, log_normaliser, *ctx.places, *ctx.sizes)
        ctx.save_for_backward(query, key, value, out, log_normaliser)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, log_normaliser = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]
        inputs = (grad_out.contiguous(), query, key, value, out, log_normaliser)
        call("causal_attention_backward", query.dtype, *inputs, *grads, *ctx.places, *ctx.sizes)
        return *grads, None, None, None, None
