"""Attention for cases where PyTorch is slow on a CPU: one new token per row, and many short sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridflow.errors import ModelError
from hybridflow.models.kernels.library import call


def append_and_attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, ends: Tensor, longest: int, scaling: float
) -> Tensor:
    """Append each row's new key and value to the cache, then attend to all cached tokens of the row.

    query (rows, heads, dim); key and value (rows, kv_heads, dim), where kv_heads divides heads; keys and values
    (at least rows, kv_heads, capacity, dim), contiguous, are modified; ends (rows,) int64 are the numbers of tokens
    cached before, at most `longest`. Returns (rows, heads, dim). Requires tensors for which `serves` is true; no
    gradient.
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
    """Compute causal attention of packed sequences, of which families share a prefix.

    A family lists lengths: of a trunk, then of branches, each of which continues the trunk and does not attend to other
    branches; `[[length], ...]` are plain sequences. query (tokens, heads, dim); key and value (tokens, kv_heads, dim),
    where kv_heads divides heads; the lengths, each at least 1, add up to tokens. Returns (tokens, heads, dim),
    differentiable. Time is quadratic in the lengths, and without the blocking that makes long sequences fast. Requires
    tensors for which `serves` is true. Raises ModelError if the lengths are invalid.
    """
    starts = torch.tensor([0, *(length for family in families for length in family)]).cumsum(0)
    family_starts = torch.tensor([0, *map(len, families)]).cumsum(0)
    if int(starts[-1]) != len(query) or int(starts.diff().min()) < 1:
        raise ModelError(
            f"the lengths of families are invalid: expected {len(query)} tokens, at least 1 each, but they add up to "
            f"{int(starts[-1])}."
        )
    longest = max(family[0] + max(family[1:], default=0) for family in families)
    return _CausalAttention.apply(query, key, value, starts, family_starts, longest, float(scaling))


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, starts, family_starts, longest, scaling):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        tokens, heads, dim = query.shape
        out, log_normalizer = torch.empty_like(query), query.new_empty(tokens, heads, dtype=torch.float32)
        ctx.layout = (starts, family_starts)
        ctx.sizes = (len(family_starts) - 1, heads, key.shape[1], dim, longest, scaling)
        call("causal_attention", query.dtype, query, key, value, out, log_normalizer, *ctx.layout, *ctx.sizes)
        ctx.save_for_backward(query, key, value, out, log_normalizer)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, log_normalizer = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]
        inputs = (grad_out.contiguous(), query, key, value, out, log_normalizer)
        call("causal_attention_backward", query.dtype, *inputs, *grads, *ctx.layout, *ctx.sizes)
        return *grads, None, None, None, None
