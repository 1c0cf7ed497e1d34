"""`Backend`: what a worker group needs of the thing that runs its workers. `local.py` runs them in this process;
others have a process for each. Workers and handles are opaque to everybody else.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hybridflow.controller.class_with_init_args import ClassWithInitArgs
from hybridflow.controller.resource_pool import ResourcePool


class WorkerRef(Protocol):
    """A worker somewhere."""

    @property
    def name(self) -> str:
        """Unique among living workers: the name of the group, "/", the rank."""
        ...


class ObjectHandle(Protocol):
    """A value kept by the backend: the result of a call, perhaps not there yet, or something put.

    The value is let go when the handle is released or nobody refers to it any more.
    """

    def get(self) -> Any:
        """A private copy of the value, waiting for it if need be. Raises what the call raised."""
        ...


class Backend(Protocol):
    """Runs workers. A worker owns what it receives, and the caller what it gets: everything is a private copy.

    The error of a worker keeps its type if it is a HybridFlowError and is a WorkerError otherwise. It is raised by
    `call` if the call runs at once, by `get` and `wait` if it does not.
    """

    def spawn(self, cls_with_init: ClassWithInitArgs, resource_pool: ResourcePool, name: str) -> Sequence[WorkerRef]:
        """Start one worker for each rank of the pool, in order of rank, with the standard SPMD environment
        variables set. `name` is the name of the group. Fails as a whole: if one constructor raises, none stays."""
        ...

    def call(self, worker: WorkerRef, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ObjectHandle:
        """Start a method of a worker. An argument that is a handle of this backend arrives as its value."""
        ...

    def put(self, value: Any) -> ObjectHandle:
        """Keep a value for several calls."""
        ...

    def get(self, handles: Sequence[ObjectHandle]) -> list[Any]:
        """The values, in order, waiting for all of them."""
        ...

    def wait(self, handles: Sequence[ObjectHandle]) -> None:
        """Wait until the calls have finished, without reading results. Raises what a call raised."""
        ...

    def release(self, handles: Sequence[ObjectHandle]) -> None:
        """Let the values go now; getting them afterwards is an error."""
        ...

    def is_alive(self, worker: WorkerRef) -> bool:
        """Whether the worker can take calls."""
        ...

    def shutdown(self, workers: Sequence[WorkerRef]) -> None:
        """Stop the workers. Stopping one twice is no error; calling a stopped one is a WorkerError."""
        ...
