"""Several roles in one process for each rank, each with a group of its own: models that take turns on a device.

The groups share processes and nothing else. A method that two roles have is two methods, called each on its own group.
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
    """A group for each class, by name, whose workers of one rank live in one process.

    `meshes` are those of each group, by the name of the group. Calls on groups of one process wait for each other.
    """
    check_names(classes)
    workers = backend.spawn(classes, resource_pool)
    return {
        name: WorkerGroup(resource_pool, cls, backend, name, (meshes or {}).get(name), workers=workers[name])
        for name, cls in classes.items()
    }


def check_names(classes: Mapping[str, ClassWithInitArgs]) -> None:
    """Raises DispatchError if there is nothing to fuse, or something that is no class with its arguments."""
    wrong = {name: type(cls).__name__ for name, cls in classes.items() if not isinstance(cls, ClassWithInitArgs)}
    if wrong or not classes:
        raise DispatchError(
            f"colocated roles are a mapping of names to ClassWithInitArgs, e.g. {{'actor': ClassWithInitArgs(Actor)}}; "
            f"got {wrong or 'none'}."
        )
