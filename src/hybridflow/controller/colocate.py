"""Colocated roles: several worker groups in the same processes, so that models take turns on a device.

The groups share processes and nothing else. If two roles define the same method, each group calls its own.
"""

from collections.abc import Mapping

from hybridflow.controller.backend import Backend
from hybridflow.controller.class_with_init_args import ClassWithInitArgs
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.errors import DispatchError


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
