"""The counter-based random numbers of `random_streams` as tensors on any device, with the same bits."""

import numpy as np
import torch
from torch import Tensor

from hybridflow.runtime.random_streams import GOLDEN, MULTIPLIER_1, MULTIPLIER_2


def uniform_after(states: Tensor, last_key: Tensor) -> Tensor:
    """Return `uniform(*keys, last_key)` on the tensors' device, where states are those of `uniform_state(*keys)`.

    states and last_key: int64, of shapes that broadcast; a state's bits are those of the uint64. Returns float64 in
    [0, 1). It runs without a copy to the host, so it can be part of a CUDA graph.
    """
    bits = _mix(states ^ _mix(last_key + _signed(GOLDEN)))
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64; products of int64 are modulo 2**64."""
    x = (x ^ _shifted(x, 30)) * _signed(MULTIPLIER_1)
    x = (x ^ _shifted(x, 27)) * _signed(MULTIPLIER_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros; int64 is shifted with copies of its sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(word: np.uint64) -> int:
    """Return the int64 with the bits of a uint64."""
    return int(word.view(np.int64))
