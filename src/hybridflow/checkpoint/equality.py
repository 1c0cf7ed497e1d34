"""Comparison of states bit for bit, on any device and of any sharding."""

from typing import Any

import torch
from torch import Tensor

from hybridflow.checkpoint.state import split_state, tensors_to_fill
from hybridflow.runtime.shards import local


def zeros_like_state(state: Any) -> Any:
    """Return a state of the same structure, with zeros in place of its tensors, sharded and placed alike."""
    if isinstance(state, dict):
        return {key: zeros_like_state(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(zeros_like_state, state))
    return torch.zeros_like(state) if isinstance(state, Tensor) else state


def first_difference(state: Any, other: Any) -> str:
    """Return the name of the first tensor whose bits differ, "its structure" for another difference, "" if none.

    Of sharded tensors, the shards of this rank are compared.
    """
    tensors, others = tensors_to_fill(state), tensors_to_fill(other)
    if tensors.keys() != others.keys() or split_state(state)[0] != split_state(other)[0]:
        return "its structure"
    for name, tensor in tensors.items():
        shard, stored = local(tensor), local(others[name]).to(local(tensor).device)
        if shard.dtype != stored.dtype or not torch.equal(_bits(shard), _bits(stored)):
            return f"tensor '{name}'"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, which are equal for equal NaNs, and differ for 0 and -0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
