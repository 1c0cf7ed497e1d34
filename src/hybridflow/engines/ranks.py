"""The ranks of an engine as a device mesh: data-parallel replicas, each of sequence and tensor parallel ranks.

    axes: data x sequence x tensor, the last one fastest, as in the worker group's mesh

All ranks of a replica get the same rows, so sums over `data` count each row once. Parameters are sharded over data and
sequence together, because ranks along both compute on different tokens. With `parallel.replicas` above 1 (HSDP; Zhao et
al., 2023) they are sharded within as many groups of adjacent ranks, so that only sums of gradients cross groups. With
`parallel.expert` above 1, adjacent ranks along data are an axis EXPERT, and experts are sharded over the other ranks.
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

DATA, SEQUENCE, TENSOR, SHARD, REPLICA = "data", "sequence", "tensor", "shard", "replica"
EXPERT, EXPERT_SHARD = "expert", "expert_shard"


class Ranks:
    """The place of this process in its default group; alone without a group, or in a group of one (vLLM's).

    `mesh` is that of FSDP2: SHARD, after REPLICA if there are several groups of shards. `needs_mesh`: a group of one
    gets it too.
    """

    def __init__(self, parallel: ParallelConfig, device: torch.device, *, needs_mesh: bool = False) -> None:
        self.sequence, self.tensor, self.expert = parallel.sequence, parallel.tensor, parallel.expert
        self.world_size = num_ranks()
        self.data = self.world_size // (self.sequence * self.tensor)
        size, product = parallel.divisor
        if self.world_size % size:
            raise ModelConfigError(
                f"{product} does not divide the {self.world_size} ranks; change one of them, or the number of ranks."
            )
        if contradiction := parallel.contradiction:
            raise ModelConfigError(f"{contradiction}.")
        self.mesh: DeviceMesh | None = None
        if needs_mesh or self.world_size > 1:
            require_backends(device)
            grid = (self.data, self.sequence, self.tensor)
            self._axes, self.mesh = _meshes_of(dist.group.WORLD, device.type, grid, parallel.replicas, self.expert)

    @property
    def place_in_world(self) -> int:
        """This rank among all."""
        return 0 if self.mesh is None else dist.get_rank()

    @property
    def is_alone(self) -> bool:
        """Whether this process is the only rank, so that nothing is sharded."""
        return self.mesh is None

    def axis(self, name: str) -> DeviceMesh:
        """Return the mesh of one axis; SHARD is data and sequence together, within one of `parallel.replicas`."""
        assert self.mesh is not None, "a single rank has no mesh"
        return self._axes[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of one axis."""
        return self.axis(name).get_group()

    def place(self, name: str) -> int:
        """Return the index of this rank along an axis."""
        return 0 if self.mesh is None else self.axis(name).get_local_rank()

    def sum(self, value: int) -> int:
        """Return the sum over the data-parallel replicas."""
        if self.mesh is None:
            return value
        total = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(total, group=self.group(DATA))
        return int(total)

    def sum_floats(self, values: Sequence[float], axes: Sequence[str] = (DATA,)) -> list[float]:
        """Return the sums over the ranks of some axes."""
        if self.mesh is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        for axis in axes:
            dist.all_reduce(total, group=self.group(axis))
        return total.tolist()

    def count_all(self, flag: bool) -> int:
        """Return the number of ranks, of all axes, on which `flag` is true."""
        if self.mesh is None:
            return int(flag)
        total = torch.tensor(int(flag))
        dist.all_reduce(total)
        return int(total)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all data-parallel replicas, in order, on every rank."""
        if self.mesh is None:
            return [value]
        gathered: list[Any] = [None] * self.data
        dist.all_gather_object(gathered, value, group=self.group(DATA))
        return gathered


@cache
def _meshes_of(
    world: dist.ProcessGroup, device_type: str, grid: tuple[int, int, int], replicas: int, expert: int
) -> tuple[dict[str, DeviceMesh], DeviceMesh]:
    """Return the meshes of the axes by name, and that of FSDP2; cached by default group, as each creates groups."""
    data, sequence, tensor = grid
    if expert > 1:
        names = (EXPERT_SHARD, EXPERT, SEQUENCE, TENSOR)
        mesh = init_device_mesh(device_type, (data // expert, expert, sequence, tensor), mesh_dim_names=names)
        axes = {name: mesh[name] for name in (EXPERT, SEQUENCE, TENSOR)}
        axes[DATA] = mesh[EXPERT_SHARD, EXPERT]._flatten(DATA)
        axes[EXPERT_SHARD] = mesh[EXPERT_SHARD] if sequence == 1 else mesh[EXPERT_SHARD, SEQUENCE]._flatten("others")
        axes[SHARD] = fsdp = mesh[EXPERT_SHARD, EXPERT, SEQUENCE]._flatten(SHARD)
        return _with_timeout(world, axes, fsdp)
    mesh = init_device_mesh(device_type, grid, mesh_dim_names=(DATA, SEQUENCE, TENSOR))
    axes = {name: mesh[name] for name in (DATA, SEQUENCE, TENSOR)}
    if replicas == 1:
        axes[SHARD] = fsdp = mesh[DATA, SEQUENCE]._flatten(SHARD)
    else:  # A parameter's axes must be those of one mesh.
        sizes = replicas, data * sequence // replicas, tensor
        groups = init_device_mesh(device_type, sizes, mesh_dim_names=(REPLICA, SHARD, TENSOR))
        axes |= {SHARD: groups[SHARD], TENSOR: groups[TENSOR]}
        fsdp = groups[REPLICA, SHARD]
    return _with_timeout(world, axes, fsdp)


def _with_timeout(
    world: dist.ProcessGroup, axes: dict[str, DeviceMesh], fsdp: DeviceMesh
) -> tuple[dict[str, DeviceMesh], DeviceMesh]:
    """Give the groups of all axes the timeout of the default group, and return the axes."""
    timeout = world._get_backend(torch.device("cpu")).options._timeout  # a mesh gives its groups 30 minutes
    for group in {group for axis in (*axes.values(), fsdp) for group in axis.get_all_groups()}:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return axes, fsdp
