"""The finalizer of splitmix64 (Steele, Lea, Flood 2014) for tensors; `random_streams` has it for numpy."""

import numpy as np
from torch import Tensor

from hybridflow.runtime.random_streams import GOLDEN, MULTIPLIER_1, MULTIPLIER_2


def signed(word: np.uint64) -> int:
    """Return the int64 with the bits of a uint64."""
    return int(word.view(np.int64))


STEP = signed(GOLDEN)
"""The distance of the words that are mixed for consecutive numbers."""


def mixed(words: Tensor) -> Tensor:
    """Mix int64 words, whose products are modulo 2**64; different words give different ones."""
    words = (words ^ shifted(words, 30)) * signed(MULTIPLIER_1)
    words = (words ^ shifted(words, 27)) * signed(MULTIPLIER_2)
    return words ^ shifted(words, 31)


def shifted(words: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros; int64 is shifted with copies of its sign."""
    return (words >> count) & ((1 << (64 - count)) - 1)
