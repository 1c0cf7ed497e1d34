"""Buckets of weights: what one holds, how all weights are cut into them, and packing one into one piece of memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import WeightSyncError
from hybridflow.weight_sync.fingerprint import fingerprint

ALIGNMENT = 64
"""Bytes that a tensor's place in a packed bucket is a multiple of."""


class WeightSpec(NamedTuple):
    """A tensor that will come: its Hugging Face name, shape and dtype ("float32", ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Of the tensor's contents."""
        return prod(self.shape) * self.torch_dtype.itemsize


def spec_of(name: str, tensor: Tensor) -> WeightSpec:
    """What describes a tensor."""
    return WeightSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Bucket:
    """Some weights with their fingerprints, which were made where the weights are learned."""

    weights: dict[str, Tensor]
    fingerprints: dict[str, int]
    version: int = 0

    @property
    def specs(self) -> list[WeightSpec]:
        """What is in it, in order."""
        return [spec_of(name, tensor) for name, tensor in self.weights.items()]

    @property
    def num_bytes(self) -> int:
        """Of all contents."""
        return sum(tensor.nbytes for tensor in self.weights.values())


def plan_buckets(specs: Sequence[WeightSpec], bucket_bytes: int) -> list[list[WeightSpec]]:
    """The specs in order, in buckets of at most `bucket_bytes`; a larger tensor is a bucket of its own."""
    plan: list[list[WeightSpec]] = []
    used = 0
    for spec in specs:
        if not plan or used + spec.num_bytes > bucket_bytes:
            plan.append([])
            used = 0
        plan[-1].append(spec)
        used += spec.num_bytes
    return plan


def fill_buckets(
    plan: Sequence[Sequence[WeightSpec]], weights: Iterable[tuple[str, Tensor]], version: int
) -> Iterator[Bucket]:
    """The buckets of a plan, each gathered when it is asked for, with the weights' version.

    Raises WeightSyncError if the weights are others.
    """
    source = iter(weights)
    for planned in plan:
        gathered: dict[str, Tensor] = {}
        for spec in planned:
            name, tensor = next(source, ("", None))
            if tensor is None or spec_of(name, tensor) != spec:
                came = "nothing" if tensor is None else f"{spec_of(name, tensor)}"
                raise WeightSyncError(f"the weights to send begin with {came} where {spec} was announced.")
            gathered[name] = tensor
        yield Bucket(gathered, {name: fingerprint(tensor) for name, tensor in gathered.items()}, version)


def packed_size(specs: Iterable[WeightSpec]) -> int:
    """Bytes of a bucket in one piece."""
    return sum(_padded(spec.num_bytes) for spec in specs)


def pack(bucket: Bucket, into: Tensor) -> None:
    """Copy the contents into one piece of memory, (packed_size,) uint8 on any device."""
    for part, tensor in zip(unpack(bucket.specs, into).values(), bucket.weights.values(), strict=True):
        part.copy_(tensor)


def unpack(specs: Iterable[WeightSpec], packed: Tensor) -> dict[str, Tensor]:
    """The tensors of a packed bucket: views of its memory."""
    weights, start = {}, 0
    for spec in specs:
        part = packed[start : start + spec.num_bytes]
        weights[spec.name] = part.view(spec.torch_dtype).view(spec.shape)
        start += _padded(spec.num_bytes)
    return weights


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
