"""Shards of tensors, and boxes: the rectangular parts of a tensor that ranks hold, send and load."""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Any) -> Any:
    """Return this rank's shard of a tensor; a tensor that is not sharded, or None, is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, shard: Tensor) -> Tensor:
    """Return `shard` as the shard of a DTensor that is sharded as `like`; unchanged if `like` is not a DTensor.

    Without communication or a copy: a shard on the host stays there, whatever the device of the mesh. The result can be
    read, as by `torch.distributed.checkpoint`, and gathered by `full_tensor`, but not computed with.
    """
    return DTensor(shard, like._spec, requires_grad=False) if isinstance(like, DTensor) else shard


Box = tuple[tuple[int, int], ...]
"""The first index and the end, which is not included, of each dimension of a tensor."""


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple((0, size) for size in shape)


def empty_box(shape: Sequence[int]) -> Box:
    """Return the box of no elements of a tensor."""
    return tuple((0, 0) for _ in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(end - first for first, end in box)


def num_elements(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(box_shape(box))


def intersection(a: Box, b: Box) -> Box | None:
    """Return the elements that two boxes of one tensor have in common; None if there are none."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(first >= end for first, end in common) else common


def contains(outer: Box, inner: Box) -> bool:
    """Return whether all elements of `inner` are in `outer`."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def part_of(held: Tensor, held_box: Box, box: Box) -> Tensor:
    """Return a view of `box` in a tensor that holds `held_box`, of which it must be a part."""
    for dim, ((start, _), (first, end)) in enumerate(zip(held_box, box, strict=True)):
        held = held.narrow(dim, first - start, end - first)
    return held


def box_of_shard(tensor: Tensor) -> Box:
    """Return the box of a tensor that this rank holds: all of it unless it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return whole_box(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tuple(tensor.to_local().shape), "DTensor's own description differs from its shard"
    return tuple((first, first + size) for first, size in zip(offset, shape, strict=True))


def box_of_view(view: Tensor, whole: Tensor) -> Box | None:
    """Return the box of a contiguous tensor that a view of it shows; None if the view shows no box in this order."""
    if view.ndim != whole.ndim:
        return None
    offset, firsts = view.storage_offset() - whole.storage_offset(), []
    for size, stride, step in zip(view.shape, whole.stride(), view.stride(), strict=True):
        if size > 1 and step != stride:
            return None
        firsts.append(offset // stride)
        offset %= stride
    return tuple((first, first + size) for first, size in zip(firsts, view.shape, strict=True))
