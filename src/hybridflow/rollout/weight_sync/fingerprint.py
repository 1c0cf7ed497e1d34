"""A 64-bit checksum of a tensor that depends on its contents and their positions.

The 64-bit words of a tensor, the last padded with zeros, are mixed with an odd constant of their position and added
modulo 2**64 in blocks; the block sums are combined in the same way. Mixing is one-to-one, so a change of a single word
always changes the checksum. Mixing is not linear, so changes of several words, for example of their signs, cancel only
by chance, with probability 2**-64.
"""

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from hybridflow.models.kernels.library import serves_words, sum_words
from hybridflow.runtime.partial_tensor import contents_of
from hybridflow.runtime.side_stream import SideStream
from hybridflow.runtime.splitmix import STEP, mixed

BLOCK = 1024
"""Words per block. Blocks share a table of constants, which fits into the L1 cache."""

PART = 2**22
"""Words that are mixed at once without a compiled kernel, as on a GPU."""


def fingerprint(tensor: Tensor) -> int:
    """Return the checksum of a tensor on any device; equal bytes give equal checksums."""
    return Fingerprints({"": tensor}).read()[""]


def placed_fingerprints(weights: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, int]]:
    """Return the checksum and the address of each tensor by name: equal addresses in a process are shared memory."""
    return {name: (fingerprint(tensor), tensor.data_ptr()) for name, tensor in weights}


class Fingerprints:
    """The checksums of tensors by name. On a GPU they are computed while the host continues, until `read`.

    They run on a side stream, beside the gathering of the next tensors, and come to the host together.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._sums: dict[str, int | Tensor] = {}
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Start to compute the checksum of a tensor, of its elements in memory; all tensors are on one device."""
        tensor = contents_of(tensor)
        stream = _stream_of(tensor.device)
        with stream():
            self._sums[name] = _sum_of(tensor)
        stream.keep(tensor)

    def read(self) -> dict[str, int]:
        """Return the checksums; they are read from a device in one transfer."""
        pending = {name: found for name, found in self._sums.items() if isinstance(found, Tensor)}
        if pending:
            sums = list(pending.values())
            with _stream_of(sums[0].device)():
                numbers = torch.stack(sums).tolist()
            self._sums |= {name: number % 2**64 for name, number in zip(pending, numbers, strict=True)}
        return {name: found for name, found in self._sums.items() if isinstance(found, int)}


@cache
def _stream_of(device: torch.device) -> SideStream:
    return SideStream(device)


def _sum_of(tensor: Tensor) -> int | Tensor:
    """Return a checksum, or on a device its signed value without dimensions, which is not awaited."""
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
    return _mixed(of_blocks, _odd(len(of_blocks), flat.device)).sum()


def _mixed(words: Tensor, constants: Tensor) -> Tensor:
    """Mix words as the compiled kernel `mixed` does; the masks remove the sign bits that a signed shift brings in."""
    words = words * constants
    words = (words ^ ((words >> 32) & (2**32 - 1))) * constants
    return words ^ ((words >> 29) & (2**35 - 1))


def _sums(blocks: Tensor, constants: Tensor) -> Tensor:
    rows = max(1, PART // len(constants))
    return torch.cat([_mixed(part, constants).sum(1) for part in blocks.split(rows)] or [blocks.new_zeros(0)])


@cache
def _table_on(count: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers."""
    return (mixed(torch.arange(1, count + 1) * STEP) | 1).to(device)


def _odd(count: int, device: torch.device) -> Tensor:
    """Return `count` constants. Tables are cached by the next power of two, so that there are few of them."""
    size = max(BLOCK, 1 << (count - 1).bit_length())
    return _table_on(size, device)[:count]
