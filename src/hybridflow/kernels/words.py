"""A checksum over 64-bit words, at the speed of reading memory."""

from torch import Tensor

from hybridflow.kernels.library import call


def sum_words(words: Tensor, constants: Tensor) -> int:
    """Return a checksum modulo 2**64 of words (n,) int64, for which `serves_words` must be true.

    In blocks of `width` words, each word is mixed with a constant of `constants` (width,) int64 and added; the block
    sums are mixed with odd numbers of SplitMix64 and added.
    """
    return call("sum_words", words.dtype, words, constants, len(words), len(constants)) % 2**64
