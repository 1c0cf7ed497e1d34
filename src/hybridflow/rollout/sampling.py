"""Sampling of tokens by inverse CDF from given uniform numbers, with log-probs under the sampling distribution."""

import torch
from torch import Tensor

from hybridflow.kernels import draw, serves
from hybridflow.rollout.base import SamplingParams


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
