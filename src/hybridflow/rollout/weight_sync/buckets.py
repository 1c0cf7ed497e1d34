"""Buckets of weights: their contents, the plan that assigns weights to buckets, and packing into one memory block."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.errors import WeightSyncError
from hybridflow.rollout.weight_sync.fingerprint import Fingerprints

ALIGNMENT = 64
"""Alignment in bytes of each tensor in a packed bucket."""


class WeightSpec(NamedTuple):
    """The description of a tensor: its Hugging Face name, shape and dtype ("float32", ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a torch.dtype."""
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return prod(self.shape) * self.torch_dtype.itemsize


def spec_of(name: str, tensor: Tensor) -> WeightSpec:
    """Return the spec of a named tensor."""
    return WeightSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Bucket:
    """Some of the weights, with the fingerprints that the trainer computed."""

    weights: dict[str, Tensor]
    fingerprints: dict[str, int]
    version: int = 0

    @property
    def specs(self) -> list[WeightSpec]:
        """The specs of the weights, in order."""
        return [spec_of(name, tensor) for name, tensor in self.weights.items()]

    @property
    def num_bytes(self) -> int:
        """The size of all weights in bytes."""
        return sum(tensor.nbytes for tensor in self.weights.values())


def plan_buckets(specs: Sequence[WeightSpec], bucket_bytes: int) -> list[list[WeightSpec]]:
    """Assign specs, in order, to buckets of at most `bucket_bytes`; a larger tensor is alone in its bucket."""
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
    plan: Sequence[Sequence[WeightSpec]],
    weights: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    with_fingerprints: bool = True,
) -> Iterator[Bucket]:
    """Yield the buckets of a plan with the weights' version; each is gathered when it is requested.

    `with_fingerprints`: False on a rank that gathers with the others but does not send.

    Raises WeightSyncError if the weights differ from the plan in name, order, shape or dtype.
    """
    source = iter(weights)
    for planned in plan:
        gathered: dict[str, Tensor] = {}
        fingerprints = Fingerprints()
        for spec in planned:
            name, tensor = next(source, ("", None))
            if tensor is None or spec_of(name, tensor) != spec:
                found = "no weight" if tensor is None else f"{spec_of(name, tensor)}"
                raise WeightSyncError(
                    f"the weights to send do not match the announcement: expected {spec}, got {found}."
                )
            gathered[name] = tensor
            if with_fingerprints:
                fingerprints.add(name, tensor)
        yield Bucket(gathered, fingerprints.read(), version)


def packed_size(specs: Iterable[WeightSpec]) -> int:
    """Return the size of a packed bucket in bytes."""
    return sum(_padded(spec.num_bytes) for spec in specs)


def pack(bucket: Bucket, into: Tensor) -> None:
    """Copy a bucket's tensors into one memory block, (packed_size,) uint8 on any device."""
    for part, tensor in zip(unpack(bucket.specs, into).values(), bucket.weights.values(), strict=True):
        part.copy_(tensor)


def unpack(specs: Iterable[WeightSpec], packed: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a packed bucket by name, as views of its memory."""
    weights, start = {}, 0
    for spec in specs:
        part = packed[start : start + spec.num_bytes]
        weights[spec.name] = part.view(spec.torch_dtype).view(spec.shape)
        start += _padded(spec.num_bytes)
    return weights


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
