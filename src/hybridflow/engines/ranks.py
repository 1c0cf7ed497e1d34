"""The ranks of an engine as a grid: replicas of the data, each of ranks that share sequences and layers.

    axes: data x sequence x tensor, the last one fastest, as the worker group's mesh has them

Every rank of a replica is given the same rows. Sums over `data` therefore count each row once. Parameters are sharded
over data and sequence together, since ranks along both compute on tokens of their own.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybridflow.config import ParallelConfig
from hybridflow.engines.process_group import num_ranks, require_backends
from hybridflow.errors import ModelConfigError

DATA, SEQUENCE, TENSOR, SHARD = "data", "sequence", "tensor", "shard"


class Ranks:
    """The place of this process in its default group; alone without a group, or in a group of one (vLLM's).

    `needs_mesh`: a group of one gets a device mesh too, as FSDP2 requires.
    """

    def __init__(self, parallel: ParallelConfig, device: torch.device, *, needs_mesh: bool = False) -> None:
        self.sequence, self.tensor = parallel.sequence, parallel.tensor
        self.world_size = num_ranks()
        self.data, rest = divmod(self.world_size, self.sequence * self.tensor)
        if rest:
            raise ModelConfigError(
                f"parallel.sequence={self.sequence} times parallel.tensor={self.tensor} does not divide the "
                f"{self.world_size} ranks; change one of them, or the number of ranks."
            )
        self.mesh = None
        if needs_mesh or self.world_size > 1:
            require_backends(device.type)
            grid = (self.data, self.sequence, self.tensor)
            self.mesh, self._shard = _meshes_of(dist.group.WORLD, device.type, grid)

    @property
    def place_in_world(self) -> int:
        """This rank among all."""
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def is_alone(self) -> bool:
        """Whether nothing is shared with anybody."""
        return self.mesh is None

    def axis(self, name: str) -> DeviceMesh:
        """The ranks along one axis; SHARD is data and sequence together."""
        assert self.mesh is not None, "a rank that is alone has no axes"
        return self._shard if name == SHARD else self.mesh[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """As `axis`, to communicate in."""
        return self.axis(name).get_group()

    def place(self, name: str) -> int:
        """Where this rank is along an axis."""
        return 0 if self.mesh is None else self.axis(name).get_local_rank()

    def sum(self, value: int) -> int:
        """The sum over the replicas of the data."""
        if self.mesh is None:
            return value
        total = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(total, group=self.group(DATA))
        return int(total)

    def sum_floats(self, values: Sequence[float], axes: Sequence[str] = (DATA,)) -> list[float]:
        """The sums over the ranks of some axes."""
        if self.mesh is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        for axis in axes:
            dist.all_reduce(total, group=self.group(axis))
        return total.tolist()

    def count_all(self, flag: bool) -> int:
        """On how many ranks it is true, replicas or not."""
        if self.mesh is None:
            return int(flag)
        total = torch.tensor(int(flag))
        dist.all_reduce(total)
        return int(total)

    def gather(self, value: Any) -> list[Any]:
        """A value of each replica of the data, in their order, on every rank."""
        if self.mesh is None:
            return [value]
        gathered: list[Any] = [None] * self.data
        dist.all_gather_object(gathered, value, group=self.group(DATA))
        return gathered


@cache
def _meshes_of(world: dist.ProcessGroup, device_type: str, grid: tuple[int, int, int]) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the grid, and its axes of shards as one; cached by default group, since each mesh creates groups."""
    mesh = init_device_mesh(device_type, grid, mesh_dim_names=(DATA, SEQUENCE, TENSOR))
    return mesh, mesh[DATA, SEQUENCE]._flatten(SHARD)
