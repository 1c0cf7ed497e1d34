"""Worker groups on a Ray cluster: pools of its resources, processes on its nodes, batches in its object stores."""

from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.resource_pool import RayResourcePool, merge_resource_pool, split_resource_pool
from hybridflow.controller.ray.worker_group import (
    FusedClasses,
    RayClassWithInitArgs,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

__all__ = [
    "FusedClasses",
    "RayBackend",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "merge_resource_pool",
    "split_resource_pool",
]
