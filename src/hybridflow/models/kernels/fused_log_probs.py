"""Log-probs of one label per token and entropies in a few compiled passes over the logits, for a GPU.

The mathematics is that of `hybridflow.algorithms.log_probs_from_logits`. torch.compile fuses it, so that float32 values
of the logits are in registers only: the forward pass reads the logits, and the backward pass reads them and writes
their gradient, in their dtype.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridflow.algorithms.log_probs import LOWEST_LOG_PROB, scaled_logits

MAX_VARIANTS = 64
"""Number of compiled variants of each pass: of dtype, entropy, temperature, vocabulary, and training or not. Beyond
torch's limit of 8 the uncompiled pass would need several float32 copies of the logits."""


def fused_log_probs(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs (tokens,) at labels (tokens,) of logits (tokens, vocabulary), and entropies (tokens,) or None.

    Both are those of softmax(logits / temperature), in float32 (float64 for float64 logits). Differentiable once.
    """
    return _FusedFromLogits.apply(logits, labels, temperature, with_entropy)


class _FusedFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, with_entropy):
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        log_probs, entropies, log_normalizer = _run(_forward, logits, labels, temperature, with_entropy)
        ctx.save_for_backward(logits, labels, log_normalizer, entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropies):
        logits, labels, log_normalizer, entropies = ctx.saved_tensors
        if grad_log_probs is None and grad_entropies is None:
            return None, None, None, None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(grad_entropies)
        gradients = (grad_log_probs, grad_entropies)
        statistics = (log_normalizer, entropies)
        grad = _run(_backward, logits, labels, *statistics, *gradients, ctx.temperature)
        return grad, None, None, None


def _forward(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    scaled = scaled_logits(logits, temperature)
    log_normalizer = scaled.logsumexp(-1)
    log_probs = scaled_logits(logits.gather(-1, labels[:, None])[:, 0], temperature) - log_normalizer
    if not with_entropy:
        return log_probs, None, log_normalizer
    log_p = (scaled - log_normalizer[:, None]).clamp(min=LOWEST_LOG_PROB)
    return log_probs, -(log_p.exp() * log_p).sum(-1), log_normalizer


def _backward(
    logits: Tensor,
    labels: Tensor,
    log_normalizer: Tensor,
    entropies: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropies: Tensor | None,
    temperature: float,
) -> Tensor:
    # d log p_label / d z_j = [j = label] - p_j;   d H / d z_j = -p_j (log p_j + H)
    log_p = (scaled_logits(logits, temperature) - log_normalizer[:, None]).clamp(min=LOWEST_LOG_PROB)
    factor = grad_log_probs[:, None]
    if grad_entropies is not None and entropies is not None:
        factor = factor + (log_p + entropies[:, None]) * grad_entropies[:, None]
    # A comparison instead of a scatter, which would need the gradient in memory in float32.
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    grad = torch.where(is_label, grad_log_probs[:, None], 0.0) - log_p.exp() * factor
    return (grad if temperature == 1 else grad / temperature).to(logits.dtype)


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the compiled function. One compilation serves any number of tokens, for one size of the vocabulary."""
    import torch._dynamo

    dynamo = torch._dynamo.config
    if dynamo.recompile_limit < MAX_VARIANTS:  # in each call: newer versions of torch have one setting per thread
        dynamo.recompile_limit = MAX_VARIANTS
    for argument in arguments:
        if isinstance(argument, Tensor):
            torch._dynamo.maybe_mark_dynamic(argument, 0)
    return _compiled(function)(*arguments)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
