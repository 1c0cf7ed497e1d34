"""Sums of probabilities over blocks of the vocabulary, the first level of sampling: one read of the logits."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.kernels.triton_support import runs_triton


def block_sums(logits: Tensor, temperatures: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the largest tempered logit of each block, and the sum of exp(logit / temperature - largest).

    logits (rows, vocabulary); temperatures (rows,) float64, positive; blocks of `size` tokens, a power of two. Returns
    (rows, blocks) each, the largest in float32 and the sums in float64 (both float64 for float64 logits). A block
    without a possible token has -inf and 0; the sum of a block with NaN or inf is NaN.
    """
    if runs_triton(logits):
        from hybridflow.kernels.triton_vocabulary_blocks import sums_of_blocks

        return sums_of_blocks(logits, temperatures, size)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide / temperatures[:, None].to(wide.dtype)
    blocks = pad(wide, (0, -wide.shape[1] % size), value=-torch.inf).unflatten(1, (-1, size))
    largest = blocks.amax(-1)
    weights = (blocks - largest.masked_fill(largest == -torch.inf, 0.0)[:, :, None]).exp()
    return largest, weights.sum(-1, dtype=torch.float64)
