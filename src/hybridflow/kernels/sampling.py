"""Sampling tokens from logits without a copy of the logits."""

import torch
from torch import Tensor

from hybridflow.kernels.library import call


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row of logits (rows, vocabulary), with its log-prob under softmax(logits / temperature).

    The token is the first, in order of token id, whose cumulative probability exceeds the row's uniform number (rows,)
    float64. Temperature 0 takes the first largest logit, with its log-prob under softmax(logits). Returns tokens
    (rows,) int64 and log_probs (rows,) float32, NaN if a logit of the row is NaN. Requires tensors for which `serves`
    is true.
    """
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    log_probs = torch.empty(rows, dtype=torch.float32)
    sizes = (rows, vocabulary, int(temperature == 0), 1 / (temperature or 1.0))
    call("draw", logits.dtype, logits, uniforms.to(torch.float64).contiguous(), tokens, log_probs, *sizes)
    return tokens, log_probs
