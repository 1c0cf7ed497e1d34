"""Log-probs of labels and entropies from logits, a slice of the vocabulary at a time.

Arithmetic is float32 (float64 stays float64) whatever the dtype of the logits, forward and backward, but only one
slice of `chunk_size` vocabulary entries exists in it at once; between forward and backward one number per token is
kept besides the logits themselves. A vocabulary up to `chunk_size` is one slice.
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
"""exp of it is 0 even in float64; stands for -inf, since 0 * -inf is no number."""


@runtime_checkable
class VocabularyShare(Protocol):
    """Ranks that have some entries of the vocabulary each, in order; what they are given is of the same tokens."""

    first: int
    """This rank's first entry."""

    size: int
    """Entries of all ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what the ranks give, equal on all; x may be overwritten."""
        ...

    def logsumexp(self, x: Tensor) -> Tensor:
        """log sum exp of what the ranks give, equal on all."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """What each rank gives, (ranks, *x.shape), equal on all; the same shape on each."""
        ...


def log_probs_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    shared: VocabularyShare | None = None,
) -> Float[Tensor, "*batch"]:
    """log softmax(logits / temperature) at `labels`, in float32 (or float64).

        log p = z_label - log sum_j exp(z_j),   z = logits / temperature

    `shared`: logits are those of this rank's entries, labels are of the whole vocabulary, and the result is equal on
    all ranks (Shoeybi et al., 2019, Megatron-LM, section 3). Differentiable once. Raises for labels outside the
    vocabulary on CPU; on a GPU the kernel itself does.
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
    """As `log_probs_from_logits`, at several labels of each token."""
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
    """The k most likely labels, the likeliest first, and their log-probs. No gradient; `shared` as above.

    With `below` they are among the first so many entries of the vocabulary: what is padding elsewhere is not taken.
    Raises AlgorithmError if the vocabulary has fewer.
    """
    _require("top_log_probs_from_logits", logits, temperature, chunk_size)
    vocab_size = shared.size if shared else logits.shape[-1]
    num_allowed = vocab_size if below is None else min(below, vocab_size)
    if not 1 <= k <= num_allowed:
        raise AlgorithmError(
            f"top_log_probs_from_logits: k={k}, but there are {num_allowed} entries of the vocabulary to choose from; "
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
        fill = k - logits.shape[-1]  # a rank may have fewer entries than that
        filled = torch.nn.functional.pad(allowed, (0, fill), value=-math.inf) if fill > 0 else allowed
        values, places = filled.topk(k, dim=-1)
        values, places = shared.gather(values), shared.gather(places + shared.first)
        values, places = (part.movedim(0, -2).flatten(-2) for part in (values, places))
        ids = places.gather(-1, values.topk(k, dim=-1).indices)
    log_probs = candidate_log_probs_from_logits(
        logits, ids, temperature=temperature, chunk_size=chunk_size, shared=shared
    )
    return ids, log_probs


def entropy_from_logits(
    logits: Float[Tensor, "*batch vocab"], *, temperature: float = 1.0, chunk_size: int = CHUNK_SIZE
) -> Float[Tensor, "*batch"]:
    """Entropy of softmax(logits / temperature) in nats, in float32 (or float64).

        H = -sum_j p_j log p_j,   where p_j = 0 (a logit of -inf) adds nothing

    Differentiable once.
    """
    _require("entropy_from_logits", logits, temperature, chunk_size)
    _, entropies = _FromLogits.apply(logits, None, temperature, chunk_size, True, None)
    return entropies


def log_probs_and_entropy_from_logits(
    logits: Float[Tensor, "*batch vocab"],
    labels: Int[Tensor, "*batch"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    shared: VocabularyShare | None = None,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Both of the above for little more than the entropy alone.

    Where no gradient arrives for the entropies (they are only logged), the backward is that of the log-probs.
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
    """sum_j p_j^2 of softmax(logits / temperature), in float32 (or float64): the chance that two draws are equal.

    No gradient. `shared` as in `log_probs_from_logits`.
    """
    _require("sum_squared_probs_from_logits", logits, temperature, chunk_size)
    log_normaliser = reduce(
        torch.logaddexp, (scaled.logsumexp(-1) for _, scaled in _slices(logits, temperature, chunk_size))
    )
    if shared:
        log_normaliser = shared.logsumexp(log_normaliser)
    total = torch.zeros_like(log_normaliser)
    for _, scaled in _slices(logits, temperature, chunk_size):
        total += (2 * (scaled - log_normaliser.unsqueeze(-1))).exp().sum(-1)
    return shared.sum(total) if shared else total


class _FromLogits(torch.autograd.Function):
    """Log-probs (*batch, labels) at labels (*batch, labels), and entropies (*batch)."""

    @staticmethod
    def forward(ctx, logits, labels, temperature, chunk_size, with_entropy, shared):
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.first = shared.first if shared else 0
        ctx.set_materialize_grads(False)

        slices = _slices(logits, temperature, chunk_size)
        log_normaliser = reduce(torch.logaddexp, (scaled.logsumexp(-1) for _, scaled in slices))
        if shared:
            log_normaliser = shared.logsumexp(log_normaliser)

        log_probs = entropies = None
        if labels is not None:
            place = labels - ctx.first
            is_here = (place >= 0) & (place < logits.shape[-1])
            place = place.where(is_here, 0) if shared else place
            picked = _scale(logits.gather(-1, place), temperature)
            if shared:
                picked = shared.sum(picked.where(is_here, 0.0))
            log_probs = picked - log_normaliser.unsqueeze(-1)
        if with_entropy:
            entropies = torch.zeros_like(log_normaliser)
            for _, scaled in _slices(logits, temperature, chunk_size):
                log_p = (scaled - log_normaliser.unsqueeze(-1)).clamp_(min=LOWEST_LOG_PROB)
                entropies -= log_p.exp().mul_(log_p).sum(-1)
            if shared:
                entropies = shared.sum(entropies)
        ctx.save_for_backward(logits, labels, log_normaliser, entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # d log p_label / d z_j = [j = label] - p_j;   d H / d z_j = -p_j (log p_j + H)
        grad_log_probs, grad_entropies = grads
        logits, labels, log_normaliser, entropies = ctx.saved_tensors
        if grad_log_probs is None:
            if grad_entropies is None:
                return None, None, None, None, None, None
            grad_log_probs = torch.zeros_like(grad_entropies).unsqueeze(-1)
            labels = None
        of_token = grad_log_probs.sum(-1)
        grad = None if logits.shape[-1] <= ctx.chunk_size else torch.empty_like(logits)
        for start, scaled in _slices(logits, ctx.temperature, ctx.chunk_size):
            log_p = scaled - log_normaliser.unsqueeze(-1)
            if grad_entropies is None:
                of_slice = log_p.exp_().mul_(-of_token.unsqueeze(-1))
            else:
                p = log_p.clamp_(min=LOWEST_LOG_PROB).exp()
                factor = log_p.add_(entropies.unsqueeze(-1)).mul_(grad_entropies.unsqueeze(-1))
                of_slice = p.mul_(factor.add_(of_token.unsqueeze(-1)).neg_())
            if labels is not None:
                width = of_slice.shape[-1]
                place = labels - ctx.first - start
                at_label = torch.where((place >= 0) & (place < width), grad_log_probs, 0.0)
                of_slice.scatter_add_(-1, place.clamp(0, width - 1), at_label)
            if ctx.temperature != 1:
                of_slice.div_(ctx.temperature)
            if grad is None:
                return of_slice.to(logits.dtype), None, None, None, None, None
            grad[..., start : start + ctx.chunk_size] = of_slice
        return grad, None, None, None, None, None


def _slices(logits: Tensor, temperature: float, chunk_size: int) -> Iterator[tuple[int, Tensor]]:
    """Start and scaled contents of each slice; a slice may share memory with the logits and is not to be written."""
    for start in range(0, logits.shape[-1], chunk_size):
        yield start, _scale(logits[..., start : start + chunk_size], temperature)


def _scale(logits: Tensor, temperature: float) -> Tensor:
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
            "labels must have the shape of logits without the vocabulary axis" + (", and one more." if several else ".")
        )
    if labels.dtype != torch.int64:
        raise AlgorithmError(f"{function}: labels is {labels.dtype}; it must be torch.int64, call .long().")
    if labels.numel() and is_free_to_read(labels):
        lowest, highest = (int(bound) for bound in labels.aminmax())
        vocab_size = shared.size if shared else logits.shape[-1]
        if lowest < 0 or highest >= vocab_size:
            raise AlgorithmError(
                f"{function}: labels are from {lowest} to {highest}, but the vocabulary has {vocab_size} "
                "entries; give tokens that do not count any valid label, such as 0, and mask the result."
            )
