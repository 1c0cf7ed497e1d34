"""Causal attention of packed sequences as a single call: flash attention, or a padded batch where that is missing.

HYBRIDFLOW_PACKED_ATTENTION names another kernel for it; none of them was run by this project.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

from hybridflow.errors import ModelConfigError

MAX_PADDED = 2
"""Largest ratio of computed to real tokens for which sequences are padded to one batch; not measured."""

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether varlen_attn asks for a flag if key-value heads are shared. Without the flag (torch 2.11) its kernel, which is
the same, takes them as they are."""

KERNEL_VARIABLE = "HYBRIDFLOW_PACKED_ATTENTION"
KERNELS = {"cudnn": "cuDNN 9", "FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
"""Kernels of packed rows beside PyTorch's flash attention, and what has them."""

CUDNN_HEAD_DIM = 128
"""Largest head dimension of cuDNN's kernel, forward and backward, on every GPU that has it."""


@cache
def packed_kernel() -> str:
    """Return the kernel that HYBRIDFLOW_PACKED_ATTENTION names, after loading it; "" is PyTorch's flash attention.

    Raises ModelConfigError if the name is unknown or the kernel is not installed.
    """
    name = os.environ.get(KERNEL_VARIABLE, "")
    if name and name not in KERNELS:
        raise ModelConfigError(f"{KERNEL_VARIABLE}={name!r} is invalid: expected {', '.join(KERNELS)}, or unset it.")
    if name == "cudnn" and torch.are_deterministic_algorithms_enabled():
        raise ModelConfigError(
            f"{KERNEL_VARIABLE}=cudnn is not supported with trainer.deterministic; unset the variable, or use FA3."
        )
    if name.startswith("FA"):
        try:
            attention.activate_flash_attention_impl(name)
        except (ImportError, RuntimeError, ValueError) as error:  # ValueError: unknown to this version of torch
            raise ModelConfigError(
                f"{KERNEL_VARIABLE}={name} cannot be used: {error}; install {KERNELS[name]}, or unset it."
            ) from error
    return name


@dataclass(frozen=True)
class PackedLayout:
    """The position of packed sequences in memory, on the device that computes their attention.

    `starts` (sequences + 1,) int32: the first token of each sequence, then the number of tokens. `slots` (tokens,)
    int64: the index of each token if each sequence were padded to `longest` tokens.
    """

    starts: Tensor
    slots: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "PackedLayout":
        """Build the layout of sequences of these lengths, at least 1 each, without waiting for the device."""
        sizes = np.asarray(lengths)
        starts = np.concatenate([[0], sizes.cumsum()])
        longest = int(sizes.max())
        shifts = np.arange(len(sizes)) * longest - starts[:-1]
        slots = np.arange(starts[-1]) + np.repeat(shifts, sizes)
        return cls(upload(starts.astype(np.int32), device), upload(slots, device), longest)

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.starts) - 1


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; a CUDA device is not waited for."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float,
    keys: PackedLayout | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention of packed sequences by flash attention, (tokens, heads, dim); see `supports_flash`.

    `keys`: the layout of the keys and values, if the queries are only the last tokens of each sequence. `window`: the
    number of keys that a query sees, its own included; None: all.
    """
    if packed_kernel() == "cudnn" and keys is None and window is None and query.shape[-1] <= CUDNN_HEAD_DIM:
        bias, needs_normalizers, dropout, is_causal = None, True, 0.0, True
        places = (layout.starts, layout.starts, layout.longest, layout.longest)
        arguments = (query, key, value, bias, *places, needs_normalizers, dropout, is_causal)
        return torch.ops.aten._cudnn_attention_forward(*arguments, scale=scaling)[0]
    options: dict[str, Any] = {"enable_gqa": True} if TAKES_GROUPS else {}
    keys, seen = (
        keys or layout,
        (-1 if window is None else window - 1, 0),
    )  # keys left of the query (-1: all), and right
    places = (layout.starts, keys.starts, layout.longest, keys.longest)
    out = varlen_attn(query, key, value, *places, scale=scaling, window_size=seen, **options)
    assert isinstance(out, Tensor)  # without auxiliary outputs
    return out


def padding_pays(lengths: Sequence[int]) -> bool:
    """Return whether one padded batch of these sequences has few enough tokens to replace a call per length."""
    return min(lengths) < max(lengths) and len(lengths) * max(lengths) <= MAX_PADDED * sum(lengths)


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Compute causal attention of packed sequences, (tokens, heads, dim), as one batch padded on the right.

    `attention` computes causal attention of (sequences, heads, longest, dim).
    """
    out = attention(*(padded(x, layout) for x in (query, key, value)))
    return unpadded(out, layout)


def padded(x: Tensor, layout: PackedLayout) -> Tensor:
    """Return packed sequences (tokens, heads, dim) as a batch (sequences, heads, longest, dim), padded with zeros."""
    rows = x.new_zeros(layout.num_sequences * layout.longest, *x.shape[1:]).index_copy(0, layout.slots, x)
    return rows.unflatten(0, (layout.num_sequences, layout.longest)).transpose(1, 2)


def unpadded(x: Tensor, layout: PackedLayout) -> Tensor:
    """Return a batch (sequences, heads, longest, dim) as packed sequences, (tokens, heads, dim)."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, layout.slots)
