"""`WorkerGroup`: the workers of one role behind one object.

Its methods are the registered methods of the worker class. It does not know what they compute, nor where they run,
which the backend decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from hybridflow.controller.backend import NO_TERMS, Backend, WorkerRef
from hybridflow.controller.call import Arguments, BoundMethod, arguments_by_rank, send
from hybridflow.controller.class_with_init_args import ClassWithInitArgs, require_init_args
from hybridflow.controller.columns import MethodColumns, resolve_columns, resolved
from hybridflow.controller.dispatch_functions import dispatch_all_to_all
from hybridflow.controller.local import LocalBackend
from hybridflow.controller.mesh import Mesh
from hybridflow.controller.part_sizes import GroupShares
from hybridflow.controller.register import Execute, Registration, check_parts, registered_methods
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import DispatchError
from hybridflow.protocol import Handle


class WorkerGroup:
    """A group with one worker per rank of the pool. Every registered method of the class is a method of the group.

    `backend`: where the workers run, by default this process. `name`: shown in errors and worker names, by default
    the name of the class. `meshes`: named device meshes, e.g. {"default": {"data": 2, "tensor": 4}}; "default" is
    {"data": world_size} unless given. `workers`: existing workers of the backend, by rank; None starts new ones.

    Raises DispatchError, before a worker is started, if the size of a mesh differs from the pool's world size or a
    method cannot be bound. `shares`: the shares of the ranks in calls whose parts are not equal.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        backend: Backend | None = None,
        name: str = "",
        meshes: Mapping[str, Mapping[str, int]] | None = None,
        workers: Sequence[WorkerRef] | None = None,
    ) -> None:
        require_init_args(cls_with_init)
        self.cls_with_init = cls_with_init
        self.backend: Backend = backend if backend is not None else LocalBackend()
        self.name = name or cls_with_init.cls.__name__
        self._is_open = True
        self._set_pool(resource_pool, meshes)
        self._declared = self._declare_methods()
        self.shares = self._equal_shares()
        self._workers = list(workers or self._start_workers())

    # ------------------------------------------------------------------------------------------ workers and methods

    @property
    def world_size(self) -> int:
        """The number of workers in the group."""
        return self._world_size

    @property
    def workers(self) -> list[WorkerRef]:
        """The backend's references to the workers, by rank."""
        return list(self._workers)

    @property
    def worker_names(self) -> list[str]:
        """The names of the workers, by rank."""
        return [worker.name for worker in self._workers]

    @property
    def methods(self) -> dict[str, BoundMethod]:
        """The methods of the group by name."""
        return {name: BoundMethod(self, name, *declared) for name, declared in self._declared.items()}

    def mesh(self, name: str = "default") -> Mesh:
        """Return a mesh of the group by name. Raises DispatchError if it is not defined."""
        if name not in self._meshes:
            raise DispatchError(f"{self!r} has no mesh {name!r}; its meshes are {list(self._meshes.values())}.")
        return self._meshes[name]

    def replicas(self, mesh_name: str = "default", split_axes: Sequence[str] = ("data",)) -> list[WorkerGroup]:
        """Return a group for each replica of a mesh: the workers that get the same part of a batch.

        The groups use the workers of this one, which must be shut down last. Their mesh of that name has size 1 along
        `split_axes`; each has a default mesh besides.
        """
        mesh = self.mesh(mesh_name)
        axes = {axis: 1 if axis in split_axes else size for axis, size in mesh.axes.items()}
        part_of = mesh.part_of_rank(split_axes)
        members = [
            [worker for worker, own in zip(self._workers, part_of, strict=True) if own == part]
            for part in range(mesh.num_parts(split_axes))
        ]
        return [
            WorkerGroup(
                ResourcePool([len(workers)]), self.cls_with_init, self.backend, self.name, {mesh_name: axes}, workers
            )
            for workers in members
        ]

    def __getattr__(self, name: str) -> BoundMethod:
        if name.startswith("__") or "_declared" not in self.__dict__:
            raise AttributeError(name)
        if name in self._declared:
            return BoundMethod(self, name, *self._declared[name])
        cls = self.cls_with_init.cls
        if callable(getattr(cls, name, None)):
            raise DispatchError(
                f"{cls.__name__}.{name} cannot be called on a worker group: add @register(...) to the method."
            )
        raise AttributeError(
            f"{self!r} has no method {name!r}; {cls.__name__} registers {', '.join(self._declared) or 'no methods'}."
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._declared]

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name!r}, world_size={self._world_size})"

    # ------------------------------------------------------------------------------------------ calls by name

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Handle]:
        """Call a registered method on all ranks, without its dispatch mode; return a handle with `get()` for each.

        A list or tuple must hold one argument for each rank; other values go to all ranks.
        """
        self._check_callable(method_name)
        split_args, split_kwargs = dispatch_all_to_all(self, *args, **kwargs)
        per_rank = arguments_by_rank(split_args, split_kwargs, self._world_size)
        return self._call(method_name, per_rank, Execute.ALL)

    execute_all = execute_all_async

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `execute_all_async` and return the results."""
        return self._read(self.execute_all_async(method_name, *args, **kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Handle:
        """Call a registered method on rank 0 with unchanged arguments; return a handle with `get()`."""
        self._check_callable(method_name)
        return self._call(method_name, [(args, kwargs)], Execute.RANK_ZERO)[0]

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call `execute_rank_zero_async` and return the result."""
        return self._read([self.execute_rank_zero_async(method_name, *args, **kwargs)])[0]

    def _call(self, method_name: str, per_rank: list[Arguments], mode: Execute) -> list[Handle]:
        return send(self, method_name, per_rank, [NO_TERMS] * len(per_rank), mode)

    def _read(self, handles: Sequence[Any]) -> list[Any]:
        try:
            return self.backend.get(handles)
        finally:
            self.backend.release(handles)

    # ------------------------------------------------------------------------------------------ lifetime

    def is_alive(self) -> bool:
        """Return whether every worker can take calls."""
        return self._is_open and all(self.backend.is_alive(worker) for worker in self._workers)

    def shutdown(self) -> None:
        """Stop the workers; later calls on the group raise DispatchError. Leaving `with group:` calls it."""
        self._is_open = False
        self.backend.shutdown(self._workers)

    def move(
        self,
        resource_pool: ResourcePool,
        workers: Sequence[WorkerRef],
        meshes: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Use the workers of another pool from now on, also of another size; those of before must be shut down."""
        self._set_pool(resource_pool, meshes)
        self.shares = self._equal_shares()
        self._workers = list(workers)

    def check_open(self, where: str) -> None:
        """Raise DispatchError if the group was shut down."""
        if not self._is_open:
            raise DispatchError(f"{where} was called on {self!r}, which was shut down; create a new group.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------------------------------ construction

    def _set_pool(self, resource_pool: ResourcePool, meshes: Mapping[str, Mapping[str, int]] | None) -> None:
        self.resource_pool, self._world_size = resource_pool, resource_pool.world_size
        self._meshes = self._build_meshes({"default": {"data": self._world_size}, **(meshes or {})})

    def _equal_shares(self) -> GroupShares:
        parts = {name: registration.parts for name, (registration, _) in self._declared.items()}
        return GroupShares(self.name, parts, self.backend.trace)

    def _build_meshes(self, meshes: Mapping[str, Mapping[str, int]]) -> dict[str, Mesh]:
        built = {name: Mesh(axes, name) for name, axes in meshes.items()}
        for mesh in built.values():
            if mesh.size != self._world_size:
                raise DispatchError(
                    f"{mesh} has {mesh.size} ranks, but {self!r} has {self._world_size}; the product of the mesh axes "
                    f"must equal the number of processes of the resource pool."
                )
        return built

    def _start_workers(self) -> Sequence[WorkerRef]:
        return self.backend.spawn({self.name: self.cls_with_init}, self.resource_pool)[self.name]

    def _declare_methods(self) -> dict[str, tuple[Registration, MethodColumns]]:
        cls = self.cls_with_init.cls
        registrations, columns = registered_methods(cls), columns_of_methods(self.cls_with_init)
        for name in registrations:
            if hasattr(WorkerGroup, name) or name in self.__dict__:
                raise DispatchError(
                    f"{cls.__name__}.{name} cannot be bound: WorkerGroup already defines {name}; rename the method."
                )
        config = self.cls_with_init.config
        return {
            name: (_with_parts(f"{cls.__name__}.{name}", registered, config), columns[name])
            for name, registered in registrations.items()
        }

    def _check_callable(self, method_name: str) -> None:
        self.check_open(f"{self.cls_with_init.cls.__name__}.{method_name}")
        if method_name not in self._declared:
            getattr(self, method_name)  # raises the error


def _with_parts(where: str, registered: Registration, config: Any) -> Registration:
    """Return the registration with `parts` resolved with the configuration of the worker, as `reads` is."""
    return replace(registered, parts=check_parts(f"{where}: parts", resolved(where, "parts", registered.parts, config)))


def columns_of_methods(cls_with_init: ClassWithInitArgs) -> dict[str, MethodColumns]:
    """Return the columns that each registered method reads and writes with its configuration; starts no worker."""
    cls = cls_with_init.cls
    return {
        name: resolve_columns(
            f"{cls.__name__}.{name}", registered.reads, registered.writes, registered.rows, cls_with_init.config
        )
        for name, registered in registered_methods(cls).items()
    }


def spawn_colocated(
    resource_pool: ResourcePool,
    classes: Mapping[str, ClassWithInitArgs],
    backend: Backend,
    meshes: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None,
) -> dict[str, WorkerGroup]:
    """Start one worker group per class; workers of the same rank share a process. Returns the groups by name.

    `meshes` maps the name of a group to its meshes. Calls on groups that share processes run one after another.
    """
    check_names(classes)
    workers = backend.spawn(classes, resource_pool)
    return {
        name: WorkerGroup(resource_pool, cls, backend, name, (meshes or {}).get(name), workers=workers[name])
        for name, cls in classes.items()
    }


def move_colocated(
    groups: Mapping[str, WorkerGroup],
    resource_pool: ResourcePool,
    backend: Backend,
    meshes: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None,
) -> None:
    """Replace the processes that all these groups share by new ones on another pool, also of another size.

    If the new ones do not start, the groups are as before.
    """
    workers = backend.spawn({name: group.cls_with_init for name, group in groups.items()}, resource_pool)
    for name, group in groups.items():
        backend.shutdown(group.workers)
        group.move(resource_pool, workers[name], (meshes or {}).get(name))


def check_names(classes: Mapping[str, ClassWithInitArgs]) -> None:
    """Raise DispatchError if the mapping is empty or holds a value that is not a ClassWithInitArgs."""
    wrong = {name: type(cls).__name__ for name, cls in classes.items() if not isinstance(cls, ClassWithInitArgs)}
    if wrong or not classes:
        raise DispatchError(
            f"colocated roles must map names to ClassWithInitArgs, e.g. {{'actor': ClassWithInitArgs(Actor)}}; "
            f"got {wrong or 'an empty mapping'}."
        )
