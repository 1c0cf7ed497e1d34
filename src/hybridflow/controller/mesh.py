"""`Mesh`: the ranks of a group as a grid with named axes, e.g. {"data": 2, "tensor": 4}. It says which part of a
batch a rank gets and whose result is collected; it holds no devices and no process groups.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from hybridflow.errors import DispatchError

# The outputs of a pipeline are at its last stage; along every other axis the first rank represents its replica.
LAST_RANK_IS_COLLECTED = frozenset({"pipeline"})


class Mesh:
    """Axis names and sizes. Ranks are numbered with the last axis fastest, as in torch's `init_device_mesh`."""

    def __init__(self, axes: Mapping[str, int], name: str = "default") -> None:
        self.name, self.axes = name, dict(axes)
        self._known: dict[tuple[str, ...], tuple[list[int], list[int]]] = {}
        wrong = {axis: size for axis, size in self.axes.items() if not isinstance(size, int) or size < 1}
        if wrong or not self.axes:
            raise DispatchError(
                f"mesh {name!r} = {self.axes}: each axis needs a size of at least 1, e.g. {{'data': 4}}."
            )

    @property
    def size(self) -> int:
        """Ranks in the mesh."""
        return math.prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is along each axis."""
        place = {}
        for axis, size in reversed(self.axes.items()):
            rank, place[axis] = divmod(rank, size)
        return place

    def num_parts(self, split_axes: Sequence[str]) -> int:
        """Into how many parts a batch is split."""
        missing = [axis for axis in split_axes if axis not in self.axes]
        if missing or not split_axes:
            raise DispatchError(
                f"no batch is split along {list(missing or split_axes)}: the axes of {self.name!r} are {self.axes}."
            )
        return math.prod(self.axes[axis] for axis in split_axes)

    def part_of(self, rank: int, split_axes: Sequence[str]) -> int:
        """The part that a rank gets; ranks that differ only along other axes get the same one."""
        place, part = self.coordinates(rank), 0
        for axis in split_axes:
            part = part * self.axes[axis] + place[axis]
        return part

    def part_of_rank(self, split_axes: Sequence[str]) -> list[int]:
        """The part that each rank gets."""
        return list(self._parts(tuple(split_axes))[0])

    def collected_ranks(self, split_axes: Sequence[str]) -> list[int]:
        """The rank that represents each part, in the order of the parts."""
        return list(self._parts(tuple(split_axes))[1])

    def _parts(self, split_axes: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """Both of the above, computed once: every call asks for them."""
        if split_axes not in self._known:
            part_of = [self.part_of(rank, split_axes) for rank in range(self.size)]
            collected = [rank for rank in range(self.size) if self._is_collected(self.coordinates(rank), split_axes)]
            self._known[split_axes] = part_of, sorted(collected, key=part_of.__getitem__)
        return self._known[split_axes]

    def _is_collected(self, place: Mapping[str, int], split_axes: Iterable[str]) -> bool:
        return all(
            index == (self.axes[axis] - 1 if axis in LAST_RANK_IS_COLLECTED else 0)
            for axis, index in place.items()
            if axis not in split_axes
        )

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, name={self.name!r})"
