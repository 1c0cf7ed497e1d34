"""Sampling of tokens by inverse CDF where each row has its own parameters, without a copy to the host.

The operations have fixed shapes and deterministic CUDA kernels (PyTorch's floating-point `cumsum` has none), so that
they can be part of a CUDA graph. A token is found in two levels: its block of the vocabulary, then the token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowRules:
    """The sampling parameters of each row, (rows,) each: temperature 0 is greedy, top_k 0 and top_p 1 keep all."""

    temperatures: Tensor
    top_k: Tensor
    top_p: Tensor


@dataclass(frozen=True)
class SamplingKinds:
    """The kinds of sampling among the rows; work that no row needs is left out."""

    greedy: bool = False
    tempered: bool = False
    restricted: bool = False


def sample_rows(logits: Tensor, uniforms: Tensor, rules: RowRules, kinds: SamplingKinds) -> tuple[Tensor, Tensor]:
    """Return one token for each row and its log-probability, as `sample_tokens` does for equal parameters.

    logits: (rows, vocabulary). uniforms: (rows,) float64 in [0, 1). Returns tokens (rows,) int64 and log_probs (rows,)
    float32, or float64 for float64 logits; a log-prob is not finite if the row's logits are not.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if kinds.tempered or kinds.greedy:
        temperatures = rules.temperatures.masked_fill(rules.temperatures == 0, 1.0)
        wide = wide / temperatures[:, None].to(wide.dtype)
    top = wide.amax(-1, keepdim=True)
    weights = (wide - top).exp()
    if kinds.restricted:
        weights = weights.masked_fill(~_kept(wide, weights, rules), 0.0)
    tokens, total = _draw(weights, uniforms)
    if kinds.greedy:
        tokens = torch.where(rules.temperatures == 0, wide.argmax(-1), tokens)
    chosen = (wide.gather(-1, tokens[:, None]) - top).squeeze(-1)
    return tokens, (chosen.double() - total.log()).to(wide.dtype)


def _draw(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token of each row of weights (rows, vocabulary), proportional to probabilities, and their sums."""
    blocks = _blocks(weights)
    sums = blocks.sum(-1, dtype=torch.float64)
    cumulative = sums @ _triangle(sums)
    total = cumulative[:, -1:]
    threshold = uniforms[:, None] * total
    block = _first_over(sums, cumulative, threshold)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, blocks.shape[2])).squeeze(1).double()
    before = (cumulative - sums).gather(1, block)
    token = _first_over(within, within @ _triangle(within), threshold - before)
    return (block * blocks.shape[2] + token).squeeze(1), total.squeeze(1)


def _first_over(weights: Tensor, cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the first index (rows, 1) with a weight whose cumulative sum exceeds the threshold, else the last one."""
    index = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
    possible = weights > 0
    last = index.masked_fill(~possible, 0).amax(-1, keepdim=True)
    first = index.masked_fill(~(possible & (cumulative > threshold)), weights.shape[1]).amin(-1, keepdim=True)
    return torch.minimum(first, last)


def _kept(wide: Tensor, weights: Tensor, rules: RowRules) -> Tensor:
    """Return where a token is among the top k and in their nucleus (Holtzman et al., 2020), (rows, vocabulary).

    Of equal probabilities the one with the lower token id ranks first.
    """
    ids = wide.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(wide.shape[-1], device=wide.device)
    keep = (rank < rules.top_k[:, None]) | (rules.top_k[:, None] == 0)
    ordered = weights.gather(-1, ids).double() * keep
    probabilities = ordered / ordered.sum(-1, keepdim=True)
    before = _cumulative(probabilities) - probabilities  # the mass before a token: the first is always kept
    keep &= (before < rules.top_p[:, None]) | (rules.top_p[:, None] == 1)
    return keep.gather(-1, ids.argsort(-1))


def _cumulative(x: Tensor) -> Tensor:
    """Return cumulative sums of x (rows, n) float64."""
    blocks = _blocks(x)
    within = blocks @ _triangle(blocks)
    sums = within[:, :, -1]
    return (within + (sums @ _triangle(sums) - sums)[:, :, None]).flatten(1)[:, : x.shape[1]]


def _blocks(x: Tensor) -> Tensor:
    """Return x (rows, n) in about sqrt(n) blocks of equal size, (rows, blocks, size), padded with zeros."""
    size = max(1, round(x.shape[1] ** 0.5))
    return torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def _triangle(x: Tensor) -> Tensor:
    """Return the matrix whose product from the right gives cumulative sums over the last axis of x."""
    return torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device).triu()
