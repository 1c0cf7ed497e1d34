"""Operations with gradients whose result for a row depends on no other row, and equals that of decoding bit for bit.

A forward pass is made of them if the log-probs of training have to be those of sampling. On a CPU each adds in the
order of the compiled decoder (`decoder_of_type.h`), in one piece of compiled code that both call; on a GPU both call a
kernel of Triton. Backward passes are those of other kernels.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridflow.models.kernels.library import COMPUTED, call, serves
from hybridflow.models.kernels.paged_attention import PAGE_SIZE, paged_attention
from hybridflow.models.kernels.triton_support import generation_kernels, serves_triton


def serves_exactly(x: Tensor) -> bool:
    """Whether there are kernels for tensors like `x`: compiled ones on a CPU, Triton's on a GPU."""
    return serves(x) or (serves_triton(x) and x.dtype in COMPUTED)


def recomputed(function: Callable[..., Tensor], *arguments: Any, reference: Callable[..., Tensor] | None = None) -> Any:
    """Return what a function computes in generation; its gradient is that of `reference`, which is computed again.

    `reference` is by default the function itself, as training computes it.
    """
    return _Recomputed.apply(function, reference or function, *arguments)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias + residual, rounded once; x (rows, in), weight (out, in), residual (rows, out).

    As of `PackedLinear`, but of a weight as it is. Requires tensors for which `serves_exactly` is true; on a CPU in
    bfloat16 `in` must be even.
    """
    return _Linear.apply(x, weight, bias, residual)


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[Sequence[int]],
    scaling: float,
) -> Tensor:
    """Compute causal attention as `causal_attention` does, in the order in which decoding adds.

    On a GPU without gradient, by the kernel of decoding in pages.
    """
    if not serves(query):
        tables, counts, order = _pages(tuple(map(tuple, families)), query.device)
        keys, values = (x[order].unflatten(0, (-1, PAGE_SIZE)) for x in (key, value))
        return paged_attention(query, keys, values, tables, counts, scaling, exact=True)
    starts = torch.tensor([0, *(length for family in families for length in family)]).cumsum(0)
    family_starts = torch.tensor([0, *map(len, families)]).cumsum(0)
    longest = max(family[0] + max(family[1:], default=0) for family in families)
    families = tuple(map(tuple, families))
    return _Attention.apply(query, key, value, families, starts, family_starts, longest, float(scaling))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first_keys: Tensor,
    num_keys: Tensor,
    scaling: float,
    *,
    kv_heads: int,
    places: int,
) -> tuple[Tensor, Tensor]:
    """Attend with each token to the first `num_keys` (tokens,) keys of its sequence; no gradient.

    query (tokens, heads, dim). keys and values are contiguous (.., dim): those of the first head of a token's sequence
    begin at place `first_keys` (tokens,) int64, and those of each next head `places` further. Returns (tokens, heads,
    dim), and the logs of the sums of exponentials (tokens, heads).
    """
    tokens, heads, dim = query.shape
    query, out = query.contiguous(), torch.empty(query.shape, dtype=query.dtype)
    log_normalizers = torch.empty(tokens, heads, dtype=torch.float32)
    sizes = (tokens, heads, kv_heads, dim, places * dim, int(num_keys.max()), float(scaling))
    call("attend", query.dtype, query, keys, values, first_keys, num_keys, out, log_normalizers, *sizes)
    return out, log_normalizers


def exact_log_probs(
    logits: Tensor, labels: Tensor, *, temperature: float | Tensor = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs at labels of softmax(logits / temperature), as `draw` returns them, and entropies or None.

    logits (rows, vocabulary); labels (rows,) int64; temperature: one for all rows, or on a GPU (rows,) float64, where 0
    is as 1. Both results (rows,) float32.
    """
    if serves(logits):
        return _LogProbs.apply(logits, labels, 1 / temperature, with_entropy)
    temperatures = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device).expand(len(logits))
    inverses = temperatures.masked_fill(temperatures == 0, 1.0).reciprocal().float()
    return _LogProbs.apply(logits, labels, inverses[:, None], with_entropy)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, reference, *arguments):
        ctx.reference, ctx.others = reference, [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
        with generation_kernels():
            return function(*arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needed, inputs = ctx.needs_input_grad[2:], list[Any](ctx.others)
        for i, x in enumerate(ctx.saved_tensors):
            if x is not None:
                inputs[i] = x.detach().requires_grad_(needed[i])
        with torch.enable_grad():
            out = ctx.reference(*inputs)
        grads = iter(torch.autograd.grad(out, [x for i, x in enumerate(inputs) if needed[i]], grad))
        return None, None, *(next(grads) if is_needed else None for is_needed in needed)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual):
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        residual = None if residual is None else residual.contiguous()
        if not serves(x):
            from hybridflow.models.kernels.triton_exact import linear

            return linear(x, weight, bias, residual)
        out = x.new_empty(len(x), len(weight))
        call("linear_unpacked", x.dtype, x, weight, bias, residual, out, *x.shape, len(weight))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad
        return (
            grad @ weight if wants_x else None,
            grad.T @ x if wants_weight else None,
            grad.sum(0) if wants_bias else None,
            grad if wants_residual else None,
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, families, starts, family_starts, longest, scaling):
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        first_keys, num_keys, order = _places(families)
        keys, values = (x[order].transpose(0, 1).contiguous() for x in (key, value))
        heads = {"kv_heads": len(keys), "places": keys.shape[1]}
        out, log_normalizers = attend(query, keys, values, first_keys, num_keys, scaling, **heads)
        ctx.layout = (starts, family_starts)
        ctx.sizes = (len(families), query.shape[1], key.shape[1], query.shape[2], longest, scaling)
        ctx.save_for_backward(query, key, value, out, log_normalizers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, log_normalizers = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]
        inputs = (grad_out.contiguous(), query, key, value, out, log_normalizers)
        call("causal_attention_backward", query.dtype, *inputs, *grads, *ctx.layout, *ctx.sizes)
        return *grads, None, None, None, None, None


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, inverse, with_entropy):
        logits, labels, ctx.inverse = logits.contiguous(), labels.contiguous(), inverse
        ctx.set_materialize_grads(False)
        if serves(logits):
            log_probs, log_normalizers = (torch.empty(len(logits), dtype=torch.float32) for _ in range(2))
            entropies = torch.empty_like(log_probs) if with_entropy else None
            results = (log_probs, log_normalizers, entropies)
            call("log_probs", logits.dtype, logits, labels, *results, *logits.shape, float(inverse))
        else:
            from hybridflow.models.kernels.triton_exact import log_probs as compute

            log_probs, log_normalizers, entropies = compute(logits, labels, inverse, with_entropy)
        ctx.save_for_backward(logits, labels, log_normalizers, entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropies):
        # d log p_label / d z_j = [j = label] - p_j;   d H / d z_j = -p_j (log p_j + H)
        logits, labels, log_normalizers, entropies = ctx.saved_tensors
        log_p = logits.to(torch.float32, copy=True).mul_(ctx.inverse).sub_(log_normalizers[:, None])
        factor = torch.zeros_like(log_p[:, :1]) if grad is None else grad[:, None]
        if grad_entropies is not None:
            factor = factor + (log_p.clamp(min=-1e4) + entropies[:, None]) * grad_entropies[:, None]
        z_grad = log_p.exp_().mul_(-factor)
        if grad is not None:
            z_grad.scatter_add_(1, labels[:, None], grad[:, None])
        return z_grad.mul_(ctx.inverse).to(logits.dtype), None, None, None


@lru_cache(4)
def _places(families: tuple[tuple[int, ...], ...], multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first key and the number of keys of each token, and the tokens in whose order keys are arranged.

    The keys of a trunk are there once for each of its branches. The first key of a sequence is at a `multiple`; keys
    between sequences are not used.
    """
    first_keys, num_keys, order, start, place = list[Tensor](), list[Tensor](), list[Tensor](), 0, 0
    for trunk, *branches in families:
        own, begin = torch.arange(start, start + trunk), start + trunk
        first_keys.append(torch.full((trunk,), place))
        num_keys.append(torch.arange(1, trunk + 1))
        for length in branches or [0]:
            unused = -(trunk + length) % multiple
            order += [own, torch.arange(begin, begin + length), torch.zeros(unused, dtype=torch.int64)]
            first_keys.append(torch.full((length,), place))
            num_keys.append(torch.arange(trunk + 1, trunk + length + 1))
            begin, place = begin + length, place + trunk + length + unused
        start = begin
    return torch.cat(first_keys), torch.cat(num_keys), torch.cat(order)


@lru_cache(2)
def _pages(families: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the page table and the number of keys of each token, and the tokens in the order of the pages."""
    first_keys, num_keys, order = _places(families, PAGE_SIZE)
    pages = torch.arange(-(-int(num_keys.max()) // PAGE_SIZE))
    tables = (first_keys[:, None] // PAGE_SIZE + pages).int()
    return tables.to(device), num_keys.to(device), order.to(device)
