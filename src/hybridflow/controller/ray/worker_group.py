"""`RayWorkerGroup`: a worker group on a Ray cluster, with the names and arguments of the founding design."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.controller.backend import WorkerRef
from hybridflow.controller.class_with_init_args import ClassWithInitArgs, require_init_args
from hybridflow.controller.colocate import check_names
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.resource_pool import RayResourcePool
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.errors import DispatchError

Meshes = Mapping[str, Mapping[str, int]]


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its arguments; `cls` may also be what `ray.remote` made of a class."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        super().__init__(metadata.modified_class if metadata is not None else cls, *args, **kwargs)


@dataclass(frozen=True)
class FusedClasses:
    """Classes whose objects share a process on each rank; by the prefix that names each one's group."""

    classes: Mapping[str, ClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> FusedClasses:
    """One process for several roles: give the result to `RayWorkerGroup`, and call its `spawn`."""
    check_names(class_dict)
    return FusedClasses(dict(class_dict))


class RayWorkerGroup(WorkerGroup):
    """A `WorkerGroup` on Ray; of fused classes, the processes whose roles `spawn` shows one by one.

    `backend`: by default one for the whole process, on the cluster it is connected to, or on this machine. `detached`:
    the workers outlive this process, and `RayWorkerGroup.attach` finds them by `name_prefix`.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs | FusedClasses,
        name_prefix: str = "",
        *,
        backend: RayBackend | None = None,
        meshes: Meshes | None = None,
        detached: bool = False,
        workers: list[WorkerRef] | None = None,
    ) -> None:
        self._detached = detached
        self._workers_of: dict[str, list[WorkerRef]] = {}
        self._fused = ray_cls_with_init.classes if isinstance(ray_cls_with_init, FusedClasses) else {}
        first = next(iter(self._fused.values())) if self._fused else ray_cls_with_init
        first = require_init_args(first)
        super().__init__(resource_pool, first, backend or default_backend(), name_prefix, meshes, workers)
        if self._fused:
            self._declared = {}

    def _start_workers(self) -> list[WorkerRef]:
        if self._detached and not self.name:
            raise DispatchError("a detached group needs a name by which others find it; give name_prefix.")
        backend: Any = self.backend
        classes = self._fused or {self.name: self.cls_with_init}
        spawned = backend.spawn(classes, self.resource_pool, detached_as=self.name if self._detached else "")
        self._workers_of = {name: list(workers) for name, workers in spawned.items()} if self._fused else {}
        return list(next(iter(spawned.values())))

    def spawn(
        self, prefix_set: Iterable[str], meshes: Mapping[str, Meshes] | None = None
    ) -> "dict[str, RayWorkerGroup]":
        """A group for each of these roles, in the processes of this one. Raises DispatchError for an unknown role."""
        groups = {}
        for prefix in prefix_set:
            if prefix not in self._fused:
                raise DispatchError(
                    f"spawn: {self!r} has no role {prefix!r}; it has {', '.join(self._fused) or 'none: give it what '}"
                    f"{'' if self._fused else 'create_colocated_worker_cls returns'}."
                )
            groups[prefix] = RayWorkerGroup(
                self.resource_pool,  # pyright: ignore[reportArgumentType]
                self._fused[prefix],
                prefix,
                backend=self.backend,  # pyright: ignore[reportArgumentType]
                meshes=(meshes or {}).get(prefix),
                workers=self._workers_of[prefix],
            )
        return groups

    @classmethod
    def attach(
        cls,
        name_prefix: str,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        backend: RayBackend | None = None,
        meshes: Meshes | None = None,
    ) -> "RayWorkerGroup":
        """The detached group of that name, started by another process of the cluster, as it is.

        `ray_cls_with_init` declares its methods; nothing is constructed. Raises WorkerError if there is no such group.
        """
        require_init_args(ray_cls_with_init)
        backend = backend or default_backend()
        pool, workers = backend.find_detached(name_prefix, ray_cls_with_init)
        return cls(pool, ray_cls_with_init, name_prefix, backend=backend, meshes=meshes, workers=list(workers))

    def shutdown(self) -> None:
        super().shutdown()
        for workers in self._workers_of.values():
            self.backend.shutdown(workers)


_default_backend: RayBackend | None = None


def default_backend() -> RayBackend:
    """The backend of groups that are not given one: the cluster this process is connected to, or one of its own."""
    global _default_backend
    if _default_backend is None:
        _default_backend = RayBackend()
    return _default_backend
