"""The control plane: calls on groups of workers.

A worker method becomes a call on the whole group: batches are split over the ranks, results are collected, and a
backend decides where the ranks run.
"""

from hybridflow.controller.backend import Backend, CallTerms, WorkerRef
from hybridflow.controller.call import BoundMethod
from hybridflow.controller.class_with_init_args import ClassWithInitArgs
from hybridflow.controller.columns import MethodColumns
from hybridflow.controller.dispatch import (
    DISPATCH_MODES,
    Dispatch,
    DispatchMode,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
)
from hybridflow.controller.local import LocalBackend
from hybridflow.controller.mesh import Mesh
from hybridflow.controller.register import Execute, register
from hybridflow.controller.resource_pool import ResourcePool, ResourcePoolManager, Role
from hybridflow.controller.worker import Worker
from hybridflow.controller.worker_group import WorkerGroup, columns_of_methods, move_colocated, spawn_colocated

__all__ = [
    "DISPATCH_MODES",
    "Backend",
    "BoundMethod",
    "CallTerms",
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "LocalBackend",
    "Mesh",
    "MethodColumns",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "WorkerGroup",
    "WorkerRef",
    "columns_of_methods",
    "make_nd_compute_dataproto_dispatch_fn",
    "move_colocated",
    "register",
    "register_dispatch_mode",
    "spawn_colocated",
]
