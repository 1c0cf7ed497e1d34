"""`RayWorkerGroup`: a worker group on a Ray cluster, with the names and arguments of the original HybridFlow design."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hybridflow.controller.backend import WorkerRef
from hybridflow.controller.class_with_init_args import ClassWithInitArgs, require_init_args
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.resource_pool import RayResourcePool
from hybridflow.controller.worker_group import WorkerGroup, check_names
from hybridflow.errors import DispatchError

Meshes = Mapping[str, Mapping[str, int]]


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its arguments; `cls` may also be a class decorated with `ray.remote`."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        super().__init__(metadata.modified_class if metadata is not None else cls, *args, **kwargs)


@dataclass(frozen=True)
class FusedClasses:
    """The classes whose objects share one process per rank, by the prefix that names the group of each."""

    classes: Mapping[str, ClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> FusedClasses:
    """Fuse several roles into one process per rank: pass the result to `RayWorkerGroup`, and call its `spawn`."""
    check_names(class_dict)
    return FusedClasses(dict(class_dict))


class RayWorkerGroup(WorkerGroup):
    """A `WorkerGroup` on Ray. With fused classes, it holds the processes, and `spawn` returns a group for each role.

    `backend`: by default one backend shared in this process, on the connected cluster or a local one.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs | FusedClasses,
        name_prefix: str = "",
        *,
        backend: RayBackend | None = None,
        meshes: Meshes | None = None,
        workers: list[WorkerRef] | None = None,
    ) -> None:
        self._workers_of: dict[str, list[WorkerRef]] = {}
        self._fused = ray_cls_with_init.classes if isinstance(ray_cls_with_init, FusedClasses) else {}
        first = next(iter(self._fused.values())) if self._fused else ray_cls_with_init
        first = require_init_args(first)
        super().__init__(resource_pool, first, backend or default_backend(), name_prefix, meshes, workers)
        if self._fused:
            self._declared = {}

    def _start_workers(self) -> list[WorkerRef]:
        classes = self._fused or {self.name: self.cls_with_init}
        spawned = self.backend.spawn(classes, self.resource_pool)
        self._workers_of = {name: list(workers) for name, workers in spawned.items()} if self._fused else {}
        return list(next(iter(spawned.values())))

    def spawn(
        self, prefix_set: Iterable[str], meshes: Mapping[str, Meshes] | None = None
    ) -> "dict[str, RayWorkerGroup]":
        """Return a group for each of these roles, in the processes of this group.

        Raises DispatchError for an unknown role.
        """
        groups = {}
        for prefix in prefix_set:
            if prefix not in self._fused:
                roles = ", ".join(self._fused) or "none; build the group with create_colocated_worker_cls"
                raise DispatchError(f"spawn: {self!r} has no role {prefix!r}; its roles: {roles}.")
            groups[prefix] = RayWorkerGroup(
                self.resource_pool,  # pyright: ignore[reportArgumentType]
                self._fused[prefix],
                prefix,
                backend=self.backend,  # pyright: ignore[reportArgumentType]
                meshes=(meshes or {}).get(prefix),
                workers=self._workers_of[prefix],
            )
        return groups

    def shutdown(self) -> None:
        """Stop the workers, including those of all groups from `spawn`."""
        super().shutdown()
        for workers in self._workers_of.values():
            self.backend.shutdown(workers)


@cache
def default_backend() -> RayBackend:
    """Return the shared backend for groups without one: on the connected cluster, or on a local one."""
    return RayBackend()
