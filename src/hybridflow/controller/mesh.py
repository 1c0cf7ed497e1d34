"""`Mesh`: the ranks of a group as a grid with named axes, e.g. {"data": 2, "tensor": 4}. It says which part of a
batch a rank gets and whose result is collected; it holds no devices and no process groups.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from hybridflow.errors import DispatchError

# The outputs of a pipeline are at its last stage; along every other axis the first rank speaks for its replica.
LAST_RANK_SPEAKS = frozenset({"pipeline"})


class Mesh:
    """Axis names and sizes. Ranks are numbered with the last axis fastest, as in torch's `init_device_mesh`."""

    def __init__(self, axes: Mapping[str, int], name: str = "default") -> None:
        self.name, self.axes = name, dict(axes)
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

    def collected_ranks(self, split_axes: Sequence[str]) -> list[int]:
        """The rank that speaks for each part, in the order of the parts."""
        speakers = [rank for rank in range(self.size) if self._speaks(self.coordinates(rank), split_axes)]
        return sorted(speakers, key=lambda rank: self.part_of(rank, split_axes))

    def _speaks(self, place: Mapping[str, int], split_axes: Iterable[str]) -> bool:
        return all(
            index == (self.axes[axis] - 1 if axis in LAST_RANK_SPEAKS else 0)
            for axis, index in place.items()
            if axis not in split_axes
        )

    def __repr__(self) -> str:
        return f"Mesh({self.axes}, name={self.name!r})"
