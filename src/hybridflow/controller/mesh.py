"""`Mesh`: the ranks of a group as a grid with named axes, e.g. {"data": 2, "tensor": 4}.

It defines which part of a batch each rank gets and which ranks are collected. It holds no devices or process groups.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product

from numpy import ravel_multi_index

from hybridflow.errors import DispatchError

# A pipeline has its outputs at the last stage; along every other axis the first rank represents its replica.
LAST_RANK_IS_COLLECTED = frozenset({"pipeline"})


ROLLOUT_MESH = "rollout"
"""Name of the mesh of a group's rollout engines: axes for the engines and for the ranks that share an engine."""


class Mesh:
    """A grid of named axes. Ranks are numbered with the last axis fastest, as in torch's `init_device_mesh`."""

    def __init__(self, axes: Mapping[str, int], name: str = "default") -> None:
        self.name, self.axes = name, dict(axes)
        self._cache: dict[tuple[str, ...], tuple[list[int], list[int]]] = {}
        wrong = {axis: size for axis, size in self.axes.items() if not isinstance(size, int) or size < 1}
        if wrong or not self.axes:
            raise DispatchError(
                f"mesh {name!r} = {self.axes} is invalid: expected one or more axes, each with an integer size of 1 "
                f"or more, e.g. {{'data': 4}}."
            )

    @property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.axes.values())

    def num_parts(self, split_axes: Sequence[str]) -> int:
        """Return the number of parts into which a batch is split."""
        missing = [axis for axis in split_axes if axis not in self.axes]
        if missing or not split_axes:
            raise DispatchError(
                f"split_axes={list(split_axes)} is invalid: the axes of mesh {self.name!r} are {self.axes}; use at "
                f"least one of them."
            )
        return math.prod(self.axes[axis] for axis in split_axes)

    def part_of_rank(self, split_axes: Sequence[str]) -> list[int]:
        """Return the part that each rank gets; ranks that differ only along other axes get the same part."""
        return list(self._parts(tuple(split_axes))[0])

    def collected_ranks(self, split_axes: Sequence[str]) -> list[int]:
        """Return the rank that is collected for each part, in the order of the parts."""
        return list(self._parts(tuple(split_axes))[1])

    def _parts(self, split_axes: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """Return `part_of_rank` and `collected_ranks`, cached because every call needs them."""
        if split_axes not in self._cache:
            places = [dict(zip(self.axes, place, strict=True)) for place in product(*map(range, self.axes.values()))]
            sizes, others = [self.axes[axis] for axis in split_axes], self.axes.keys() - set(split_axes)
            part_of = [int(ravel_multi_index([place[axis] for axis in split_axes], sizes)) for place in places]
            read = {axis: self.axes[axis] - 1 if axis in LAST_RANK_IS_COLLECTED else 0 for axis in others}
            collected = [rank for rank, place in enumerate(places) if read.items() <= place.items()]
            self._cache[split_axes] = part_of, sorted(collected, key=part_of.__getitem__)
        return self._cache[split_axes]

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, name={self.name!r})"
