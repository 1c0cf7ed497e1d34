"""A sum over the words of memory, at the speed at which it is read."""

from torch import Tensor

from hybridflow.kernels.library import call


def sum_words(words: Tensor, constants: Tensor) -> int:
    """Words (n,) int64 mixed with constants (width,) int64 in blocks of that width, the sums of blocks with odd numbers
    of SplitMix64, added modulo 2**64. Only for words that `serves_words` approves."""
    return call("sum_words", words.dtype, words, constants, len(words), len(constants)) % 2**64
