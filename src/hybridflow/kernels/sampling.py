"""Drawing tokens without a copy of the vocabulary."""

import torch
from torch import Tensor

from hybridflow.kernels.library import call


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """One token for each row of logits (rows, vocabulary), and its log-probability under softmax(logits / temperature).

    The token is the first, in order of token id, whose cumulative probability exceeds its uniform number (rows,)
    float64; temperature 0 takes the first largest logit, with its log-probability under softmax(logits). Returns
    tokens (rows,) int64 and log_probs (rows,) float32, NaN where a logit of the row is. Only for tensors that
    `serves` approves.
    """
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    log_probs = torch.empty(rows, dtype=torch.float32)
    sizes = (rows, vocabulary, int(temperature == 0), 1 / (temperature or 1.0))
    call("draw", logits.dtype, logits, uniforms.to(torch.float64).contiguous(), tokens, log_probs, *sizes)
    return tokens, log_probs
