"""A checksum of a box of a tensor that adds up: the sums of boxes that tile a tensor are the sum of the tensor.

Each word is mixed with an odd constant of its position in the whole tensor, and all are added modulo 2**64. Mixing is
one-to-one, so a change of a single word always changes the sum; other changes cancel only by chance.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.runtime.boxes import Box, box_shape

PART = 2**22
"""Words that are mixed at once."""

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def word_bytes(boxes: Sequence[Box], itemsize: int) -> int:
    """Return the size of the words, at most 8 bytes, that no box of a tensor cuts in its last dimension."""
    return math.gcd(8, *(itemsize * cut for box in boxes for cut in (box[-1] if box else (1,))))


def box_sum(contents: Tensor, box: Box, num_bytes: int) -> Tensor:
    """Return the checksum of a box, an int64 without dimensions on its device, in words of `num_bytes`."""
    if not contents.numel():
        return torch.zeros((), dtype=torch.int64, device=contents.device)
    if not box:
        contents, box = contents.view(1), ((0, 1),)
    words = contents.contiguous().view(-1).view(WORDS[num_bytes])
    first, end = box[-1]
    elements = num_bytes // contents.element_size()
    box = *box[:-1], (first // elements, end // elements)
    words = words.view(box_shape(box))
    rows = max(1, PART * len(words) // words.numel())
    sums = []
    for start in range(0, len(words), rows):
        part = words[start : start + rows].to(torch.int64)
        top = box[0][0] + start
        for dim, (first, end) in enumerate(((top, top + len(part)), *box[1:])):
            constants = _constants(first, end, dim, words.device)
            part = part * constants.view(-1, *[1] * (part.ndim - dim - 1))
        sums.append(_mixed(part).sum())
    return torch.stack(sums).sum()


def _constants(first: int, end: int, dim: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers for the positions first to end of a dimension."""
    return _mixed((torch.arange(first, end, device=device) + (dim << 40) + 1) * GOLDEN) | 1


def _mixed(x: Tensor) -> Tensor:
    """Mix 64-bit words (SplitMix64: Steele et al., 2014); the masks remove the sign bits of a signed shift."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * SECOND
    return x ^ ((x >> 31) & (2**33 - 1))
