"""A number that tells tensors apart by contents and places: any changed bit, and any two words exchanged.

The words of a tensor (64 bits, the last filled with zeros) are mixed with odd constants of their places and added,
modulo 2**64, in blocks; the sums of the blocks likewise. Mixing is one to one, so that a single word that changes
always changes the number. It is not linear, so that changes of several words, of signs for one, cancel by chance only,
which is one in 2**64.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from hybridflow.kernels import serves_words, sum_words

BLOCK = 1024
"""Words that share a table of constants, which fits the fastest cache of a core."""

PART = 2**22
"""Words that are mixed at once where there is no compiled kernel: on a GPU."""


def fingerprint(tensor: Tensor) -> int:
    """The number of a tensor's contents, on whatever device; equal for equal bytes."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words, rest = flat[: len(flat) // 8 * 8].view(torch.int64), flat[len(flat) // 8 * 8 :]
    if len(rest):
        last = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        last[: len(rest)] = rest
        words = torch.cat([words, last.view(torch.int64)])
    if serves_words(words):
        return sum_words(words, _odd(BLOCK, flat.device))
    num_blocks = len(words) // BLOCK
    sums = [_sums(words[: num_blocks * BLOCK].view(num_blocks, BLOCK), _odd(BLOCK, flat.device))]
    if len(tail := words[num_blocks * BLOCK :]):
        sums.append(_sums(tail[None], _odd(BLOCK, flat.device)[: len(tail)]))
    of_blocks = torch.cat(sums)
    return int(_mixed(of_blocks, _odd(len(of_blocks), flat.device)).sum()) % 2**64


def _mixed(words: Tensor, constants: Tensor) -> Tensor:
    """As the kernel `mixed`; a shift of what is signed here brings in copies of the sign, which are masked off."""
    words = words * constants
    words = (words ^ ((words >> 32) & (2**32 - 1))) * constants
    return words ^ ((words >> 29) & (2**35 - 1))


def _sums(blocks: Tensor, constants: Tensor) -> Tensor:
    rows = max(1, PART // len(constants))
    return torch.cat([_mixed(part, constants).sum(1) for part in blocks.split(rows)] or [blocks.new_zeros(0)])


@cache
def _table(count: int) -> Tensor:
    """Odd numbers without a pattern (SplitMix64: Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        x = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x | np.uint64(1)).view(np.int64))


@cache
def _table_on(count: int, device: torch.device) -> Tensor:
    return _table(count).to(device)


def _odd(count: int, device: torch.device) -> Tensor:
    """So many constants; tables are kept by the next power of two, so that few are made."""
    size = max(BLOCK, 1 << (count - 1).bit_length())
    return _table_on(size, device)[:count]
