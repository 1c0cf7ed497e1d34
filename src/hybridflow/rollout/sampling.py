"""Sampling of tokens by inverse CDF from given uniform numbers, with log-probs under the sampling distribution.

`sample_tokens` serves rows with equal parameters. In `sample_rows` each row has its own, without a copy to the host:
its operations have fixed shapes and deterministic CUDA kernels (PyTorch's floating-point `cumsum` has none), so that
they can be part of a CUDA graph. A token is found in two levels: its block of the vocabulary, then the token.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.models.kernels.library import serves
from hybridflow.models.kernels.sampling import block_sums, draw
from hybridflow.models.kernels.triton_support import runs_triton
from hybridflow.rollout.base import SamplingParams
from hybridflow.runtime.splitmix import STEP, mixed, shifted


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return one token for each row and its log-probability.

    logits: (rows, vocabulary). uniforms: (rows,) in [0, 1); the token of a row is the first, in order of token id,
    whose cumulative probability exceeds its number. Greedy sampling (temperature 0) ignores the numbers, and its
    log-probs are at temperature 1. Returns tokens (rows,) int64 and log_probs (rows,) float32, or float64 for float64
    logits; a log-prob is not finite if the row's logits are not.
    """
    if serves(logits) and not (sampling.temperature and (sampling.top_k or sampling.top_p < 1)):
        return draw(logits, uniforms, sampling.temperature)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        log_probs, tokens = logits.log_softmax(-1).max(-1)
        return tokens, log_probs
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    log_probs = logits.log_softmax(-1)
    if sampling.top_k or sampling.top_p < 1:
        log_probs = _restrict(log_probs, sampling.top_k, sampling.top_p).log_softmax(-1)
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniforms.to(torch.float64)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), log_probs.gather(-1, tokens).squeeze(-1)


def _restrict(log_probs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return log_probs with minus infinity outside the top k and outside their nucleus (Holtzman et al., 2020).

    Of equal probabilities the one with the lower token id ranks first.
    """
    ordered, ids = torch.sort(log_probs, dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[:, top_k:] = False
    if top_p < 1:
        probabilities = ordered.double().masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= probabilities.cumsum(-1) - probabilities < top_p  # the mass before a token: the first is always kept
    kept = torch.zeros_like(keep).scatter(-1, ids, keep)
    return log_probs.masked_fill(~kept, -torch.inf)


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
    restricted: bool = False


def draw_rows(
    logits: Tensor, states: Tensor, positions: Tensor, rules: RowRules, kinds: SamplingKinds
) -> tuple[Tensor, Tensor]:
    """Return what `sample_rows` does with the noise `uniform_after(states, positions)`, (rows,) int64 each."""
    if not runs_triton(logits):
        return sample_rows(logits, uniform_after(states, positions), rules, kinds)
    from hybridflow.models.kernels.triton_sampling import draw

    restrictions = (rules.top_k, rules.top_p) if kinds.restricted else None
    return draw(logits, states, positions, rules.temperatures, restrictions, _block_size(logits.shape[1]))


def sample_rows(logits: Tensor, uniforms: Tensor, rules: RowRules, kinds: SamplingKinds) -> tuple[Tensor, Tensor]:
    """Return one token for each row and its log-probability, as `sample_tokens` does for equal parameters.

    logits: (rows, vocabulary). uniforms: (rows,) float64 in [0, 1). Returns tokens (rows,) int64 and log_probs (rows,)
    float32, or float64 for float64 logits; a log-prob is not finite if the row's logits are not.
    """
    temperatures = rules.temperatures.masked_fill(rules.temperatures == 0, 1.0)
    if kinds.restricted:
        logits = logits.masked_fill(~_kept(_tempered(logits, temperatures), rules), -torch.inf)
    size = _block_size(logits.shape[1])
    largest, sums = block_sums(logits, temperatures, size)
    top = largest.amax(-1, keepdim=True)
    sums = sums * (largest - top).exp()
    cumulative = sums @ _triangle(sums)
    total = cumulative[:, -1:]
    threshold = uniforms[:, None] * total
    block = _first_over(sums, cumulative, threshold)
    ids = block * size + torch.arange(size, device=logits.device)
    exists = ids < logits.shape[1]
    weights = _tempered(logits.gather(1, ids * exists), temperatures) - top
    weights = weights.exp().double() * exists
    before = (cumulative - sums).gather(1, block)
    tokens = block * size + _first_over(weights, weights @ _triangle(weights), threshold - before)
    if kinds.greedy:
        tokens = torch.where(rules.temperatures[:, None] == 0, logits.argmax(-1, keepdim=True), tokens)
    chosen = _tempered(logits.gather(1, tokens), temperatures) - top
    return tokens.squeeze(1), (chosen.double() - total.log()).squeeze(1).to(chosen.dtype)


def _tempered(logits: Tensor, temperatures: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide / temperatures[:, None].to(wide.dtype)


def _first_over(weights: Tensor, cumulative: Tensor, threshold: Tensor) -> Tensor:
    """Return the first index (rows, 1) with a weight whose cumulative sum exceeds the threshold, else the last one."""
    index = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
    possible = weights > 0
    last = index.masked_fill(~possible, 0).amax(-1, keepdim=True)
    first = index.masked_fill(~(possible & (cumulative > threshold)), weights.shape[1]).amin(-1, keepdim=True)
    return torch.minimum(first, last)


def _kept(wide: Tensor, rules: RowRules) -> Tensor:
    """Return where a token is among the top k and in their nucleus (Holtzman et al., 2020), (rows, vocabulary).

    Of equal probabilities the one with the lower token id ranks first.
    """
    wide, ids = wide.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(wide.shape[-1], device=wide.device)
    keep = (rank < rules.top_k[:, None]) | (rules.top_k[:, None] == 0)
    probabilities = wide.double().masked_fill(~keep, -torch.inf).softmax(-1)
    before = _cumulative(probabilities) - probabilities  # the mass before a token: the first is always kept
    keep &= (before < rules.top_p[:, None]) | (rules.top_p[:, None] == 1)
    return keep.gather(-1, ids.argsort(-1))


def _cumulative(x: Tensor) -> Tensor:
    """Return cumulative sums of x (rows, n) float64."""
    size = _block_size(x.shape[1])
    blocks = pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    within = blocks @ _triangle(blocks)
    sums = within[:, :, -1]
    return (within + (sums @ _triangle(sums) - sums)[:, :, None]).flatten(1)[:, : x.shape[1]]


def _block_size(count: int) -> int:
    """Return the power of two next to the square root of the number of tokens."""
    return 1 << round(math.log2(count) / 2)


def _triangle(x: Tensor) -> Tensor:
    """Return the matrix whose product from the right gives cumulative sums over the last axis of x."""
    return torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype, device=x.device).triu()


def uniform_after(states: Tensor, last_key: Tensor) -> Tensor:
    """Return `uniform(*keys, last_key)` on the tensors' device, where states are those of `uniform_state(*keys)`.

    states and last_key: int64, of shapes that broadcast; a state's bits are those of the uint64. Returns float64 in
    [0, 1). It runs without a copy to the host, so it can be part of a CUDA graph.
    """
    bits = mixed(states ^ mixed(last_key + STEP))
    return shifted(bits, 11).to(torch.float64) * 2.0**-53
