"""Log-probs of labels and entropies from logits, computed in slices of the vocabulary.

Arithmetic is float32 (float64 for float64 logits), forward and backward, for logits of every dtype, but only one slice
of `chunk_size` vocabulary entries is in that precision at a time. Between forward and backward one number per token is
kept besides the logits. A vocabulary up to `chunk_size` is one slice.
"""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridflow.algorithms.guards import is_free_to_read, require_count, require_in_range
from hybridflow.errors import AlgorithmError

CHUNK_SIZE = 8192
"""Default number of vocabulary entries in one slice."""

LOWEST_LOG_PROB = -1e4
"""Stand-in for -inf, since 0 * -inf is NaN; its exponential is 0 even in float64."""


@runtime_checkable
class VocabularyShare(Protocol):
    """A vocabulary split over ranks, in order; all ranks pass values of the same tokens."""

    first: int
    """This rank's first vocabulary entry."""

    size: int
    """Vocabulary entries of all ranks together."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, equal on all; x may be overwritten."""
        ...

    def logsumexp(self, x: Tensor) -> Tensor:
        """Return the log of the sum of exponentials over ranks, equal on all."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return the values of all ranks, (ranks, *x.shape), equal on all; x has the same shape on each."""
        ...


def log_probs_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    shared: VocabularyShare | None = None,
) -> Float[Tensor, "*batch"]:
    """Return log softmax(logits / temperature) at `labels`, in float32 (or float64).

        log p = z_label - log sum_j exp(z_j),   z = logits / temperature

    With `shared`, logits are those of this rank's vocabulary entries, labels refer to the whole vocabulary, and the
    result is equal on all ranks (Shoeybi et al., 2019, Megatron-LM, section 3). Differentiable once. Raises for labels
    outside the vocabulary on CPU; on a GPU the kernel raises.
    """
    _require("log_probs_from_logits", logits, temperature, chunk_size, labels, shared)
    log_probs, _ = _FromLogits.apply(logits, labels.unsqueeze(-1), temperature, chunk_size, False, shared)
    return log_probs.squeeze(-1)


def candidate_log_probs_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    candidates: Int[Tensor, "*batch candidates"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    shared: VocabularyShare | None = None,
) -> Float[Tensor, "*batch candidates"]:
    """Return log-probs as `log_probs_from_logits` does, at several labels of each token."""
    _require("candidate_log_probs_from_logits", logits, temperature, chunk_size, candidates, shared, several=True)
    log_probs, _ = _FromLogits.apply(logits, candidates, temperature, chunk_size, False, shared)
    return log_probs


@torch.no_grad()
def top_log_probs_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    k: int,
    *,
    below: int | None = None,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    shared: VocabularyShare | None = None,
) -> tuple[Int[Tensor, "*batch candidates"], Float[Tensor, "*batch candidates"]]:
    """Return the k most likely labels, in descending order, and their log-probs, without gradient.

    `shared` is as in `log_probs_from_logits`. With `below` only the first `below` vocabulary entries are considered,
    which excludes padding entries. Raises AlgorithmError if there are fewer than k.
    """
    _require("top_log_probs_from_logits", logits, temperature, chunk_size)
    vocab_size = shared.size if shared else logits.shape[-1]
    num_allowed = vocab_size if below is None else min(below, vocab_size)
    if not 1 <= k <= num_allowed:
        raise AlgorithmError(
            f"top_log_probs_from_logits: k={k}, but there are {num_allowed} vocabulary entries to choose from; "
            f"use 1 to {num_allowed}."
        )
    allowed = logits
    if num_allowed < vocab_size:
        first = shared.first if shared else 0
        beyond = torch.arange(logits.shape[-1], device=logits.device) + first >= num_allowed
        allowed = logits.masked_fill(beyond, -math.inf)
    if shared is None:
        ids = allowed.topk(k, dim=-1).indices
    else:
        fill = k - logits.shape[-1]  # a rank may have fewer than k entries
        filled = torch.nn.functional.pad(allowed, (0, fill), value=-math.inf) if fill > 0 else allowed
        values, places = filled.topk(k, dim=-1)
        values, places = shared.gather(values), shared.gather(places + shared.first)
        values, places = (part.movedim(0, -2).flatten(-2) for part in (values, places))
        ids = places.gather(-1, values.topk(k, dim=-1).indices)
    log_probs = candidate_log_probs_from_logits(
        logits, ids, temperature=temperature, chunk_size=chunk_size, shared=shared
    )
    return ids, log_probs


def log_probs_and_entropy_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    shared: VocabularyShare | None = None,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Return log-probs at `labels` and the entropies of softmax(logits / temperature) in nats.

        H = -sum_j p_j log p_j,   where p_j = 0 (a logit of -inf) adds nothing

    If the entropies get no gradient (they are only logged), the backward pass is that of the log-probs.
    """
    _require("log_probs_and_entropy_from_logits", logits, temperature, chunk_size, labels, shared)
    log_probs, entropies = _FromLogits.apply(logits, labels.unsqueeze(-1), temperature, chunk_size, True, shared)
    return log_probs.squeeze(-1), entropies


@torch.no_grad()
def sum_squared_probs_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    shared: VocabularyShare | None = None,
) -> Float[Tensor, "*batch"]:
    """Return sum_j p_j^2 of softmax(logits / temperature), in float32 (or float64).

    It is the probability that two samples are equal. No gradient. `shared` as in `log_probs_from_logits`.
    """
    _require("sum_squared_probs_from_logits", logits, temperature, chunk_size)
    log_normalizer = reduce(
        torch.logaddexp, (scaled.logsumexp(-1) for _, scaled in _slices(logits, temperature, chunk_size))
    )
    if shared:
        log_normalizer = shared.logsumexp(log_normalizer)
    total = torch.zeros_like(log_normalizer)
    for _, scaled in _slices(logits, temperature, chunk_size):
        total += (2 * (scaled - log_normalizer.unsqueeze(-1))).exp().sum(-1)
    return shared.sum(total) if shared else total


class _FromLogits(torch.autograd.Function):
    """Log-probs (*batch, labels) at labels (*batch, labels), and entropies (*batch)."""

    @staticmethod
    def forward(ctx, logits, labels, temperature, chunk_size, with_entropy, shared):
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.first = shared.first if shared else 0
        ctx.set_materialize_grads(False)

        slices = _slices(logits, temperature, chunk_size)
        log_normalizer = reduce(torch.logaddexp, (scaled.logsumexp(-1) for _, scaled in slices))
        if shared:
            log_normalizer = shared.logsumexp(log_normalizer)

        place = labels - ctx.first
        is_here = (place >= 0) & (place < logits.shape[-1])
        place = place.where(is_here, 0) if shared else place
        picked = scaled_logits(logits.gather(-1, place), temperature)
        if shared:
            picked = shared.sum(picked.where(is_here, 0.0))
        log_probs, entropies = picked - log_normalizer.unsqueeze(-1), None
        if with_entropy:
            entropies = torch.zeros_like(log_normalizer)
            for _, scaled in _slices(logits, temperature, chunk_size):
                log_p = (scaled - log_normalizer.unsqueeze(-1)).clamp_(min=LOWEST_LOG_PROB)
                entropies -= log_p.exp().mul_(log_p).sum(-1)
            if shared:
                entropies = shared.sum(entropies)
        ctx.save_for_backward(logits, labels, log_normalizer, entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # d log p_label / d z_j = [j = label] - p_j;   d H / d z_j = -p_j (log p_j + H)
        grad_log_probs, grad_entropies = grads
        logits, labels, log_normalizer, entropies = ctx.saved_tensors
        if grad_log_probs is None:
            if grad_entropies is None:
                return None, None, None, None, None, None
            grad_log_probs = torch.zeros_like(grad_entropies).unsqueeze(-1)
            labels = None
        token_grad = grad_log_probs.sum(-1)
        grad = None if logits.shape[-1] <= ctx.chunk_size else torch.empty_like(logits)
        for start, scaled in _slices(logits, ctx.temperature, ctx.chunk_size):
            log_p = scaled - log_normalizer.unsqueeze(-1)
            if grad_entropies is None:
                slice_grad = log_p.exp_().mul_(-token_grad.unsqueeze(-1))
            else:
                p = log_p.clamp_(min=LOWEST_LOG_PROB).exp()
                factor = log_p.add_(entropies.unsqueeze(-1)).mul_(grad_entropies.unsqueeze(-1))
                slice_grad = p.mul_(factor.add_(token_grad.unsqueeze(-1)).neg_())
            if labels is not None:
                width = slice_grad.shape[-1]
                place = labels - ctx.first - start
                at_label = torch.where((place >= 0) & (place < width), grad_log_probs, 0.0)
                slice_grad.scatter_add_(-1, place.clamp(0, width - 1), at_label)
            if ctx.temperature != 1:
                slice_grad.div_(ctx.temperature)
            if grad is None:
                return slice_grad.to(logits.dtype), None, None, None, None, None
            grad[..., start : start + ctx.chunk_size] = slice_grad
        return grad, None, None, None, None, None


def _slices(logits: Tensor, temperature: float, chunk_size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield start and scaled contents of each slice, which may share memory with the logits: do not write to it."""
    for start in range(0, logits.shape[-1], chunk_size):
        yield start, scaled_logits(logits[..., start : start + chunk_size], temperature)


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in float32, or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1 else wide / temperature


def _require(
    function: str,
    logits: Tensor,
    temperature: float,
    chunk_size: int,
    labels: Tensor | None = None,
    shared: VocabularyShare | None = None,
    *,
    several: bool = False,
) -> None:
    if logits.dim() == 0 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise AlgorithmError(
            f"{function}: logits is {logits.dtype} of shape {tuple(logits.shape)}; "
            "it must be floating point of shape (..., vocab) with vocab at least 1."
        )
    require_in_range(function, "temperature", temperature, minimum=0, above_minimum=True)
    require_count(function, "chunk_size", chunk_size, minimum=1)
    if labels is None:
        return
    if (labels.shape[:-1] if several else labels.shape) != logits.shape[:-1]:
        raise AlgorithmError(
            f"{function}: labels has shape {tuple(labels.shape)}, but logits has shape {tuple(logits.shape)}; "
            "labels must have the shape of logits without the vocabulary axis" + (" plus one axis." if several else ".")
        )
    if labels.dtype != torch.int64:
        raise AlgorithmError(f"{function}: labels is {labels.dtype}; it must be torch.int64, call .long().")
    if labels.numel() and is_free_to_read(labels):
        lowest, highest = (int(bound) for bound in labels.aminmax())
        vocab_size = shared.size if shared else logits.shape[-1]
        if lowest < 0 or highest >= vocab_size:
            raise AlgorithmError(
                f"{function}: labels are from {lowest} to {highest}, but the vocabulary has {vocab_size} "
                "entries; set the labels of masked tokens to a valid label, such as 0, and mask the result."
            )
