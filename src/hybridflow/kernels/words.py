"""Sums over the words of memory, at the speed at which it is read."""

import torch
from torch import Tensor

from hybridflow.kernels.library import call, serves_words


def weighted_sums(words: Tensor, weights: Tensor) -> Tensor:
    """The sum of each row of words times weights, modulo 2**64: (rows, width) and (width,) int64 -> (rows,) int64.

    On a CPU alone, where PyTorch has a product of integer matrices.
    """
    if not serves_words(words):
        return torch.mv(words, weights)
    words, weights = words.contiguous(), weights.contiguous()
    sums = torch.empty(len(words), dtype=torch.int64)
    call("weighted_sums", words.dtype, words, weights, sums, *words.shape)
    return sums
