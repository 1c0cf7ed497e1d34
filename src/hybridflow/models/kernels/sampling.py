"""Sampling tokens from logits without a copy of the logits: on a CPU whole, and its first level by PyTorch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.models.kernels.library import call


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


def block_sums(logits: Tensor, temperatures: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the largest tempered logit of each block, and the sum of exp(logit / temperature - largest).

    logits (rows, vocabulary); temperatures (rows,) float64, positive; blocks of `size` tokens, a power of two. Returns
    (rows, blocks) each, the largest in float32 and the sums in float64 (both float64 for float64 logits). A block
    without a possible token has -inf and 0; the sum of a block with NaN or inf is NaN.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide / temperatures[:, None].to(wide.dtype)
    blocks = pad(wide, (0, -wide.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size))
    largest = blocks.amax(-1)
    weights = (blocks - largest.masked_fill(largest == -torch.inf, 0.0)[:, :, None]).exp()
    return largest, weights.sum(-1, dtype=torch.float64)
