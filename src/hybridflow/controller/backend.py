"""`Backend`: the Protocol of a component that runs the workers of a worker group.

`local.py` runs workers in this process; `ray/` runs one process per rank. Workers and handles are opaque outside their
backend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.controller.class_with_init_args import ClassWithInitArgs
from hybridflow.controller.columns import MethodColumns
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.protocol import Handle
from hybridflow.runtime.observe import Trace


@dataclass(frozen=True)
class CallTerms:
    """The terms of one call on one rank, in addition to its arguments.

    `columns`: the declaration of the method; the result is checked against it. `num_rows`: rows of the part that this
    rank gets; None if no batch is split. `is_read`: whether the result will be read; if not, it is not kept.
    `opens_futures`: whether the method receives futures as batches.
    """

    columns: MethodColumns | None = None
    num_rows: int | None = None
    is_read: bool = True
    opens_futures: bool = True


NO_TERMS = CallTerms()

PerRank = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
"""(args, kwargs) for each rank."""


class WorkerRef(Protocol):
    """A reference to a worker of a backend."""

    @property
    def name(self) -> str:
        """The name, unique among living workers: the name of the group, "/", the rank."""
        ...


class Backend(Protocol):
    """A component that runs workers.

    Arguments and results are private copies: the worker owns what it receives, the caller owns what it gets. The error
    of a worker keeps its type if it is a HybridFlowError; otherwise it becomes a WorkerError. `call_all` raises it if
    the call runs at once; otherwise `get` and `wait` raise it.
    """

    @property
    def trace(self) -> Trace:
        """The calls and transfers that are known to have finished."""
        ...

    def check_fit(self, resource_pools: Sequence[ResourcePool]) -> None:
        """Raise ConfigError, before any process starts, unless all pools together fit the available resources."""
        ...

    def spawn(
        self, classes: Mapping[str, ClassWithInitArgs], resource_pool: ResourcePool
    ) -> Mapping[str, Sequence[WorkerRef]]:
        """Start one process per rank of the pool and construct one object of every class in each process.

        The standard SPMD environment variables are set. The keys of `classes` are group names; the result maps each
        name to its workers in order of rank. If one constructor raises, all processes are stopped.
        """
        ...

    def call_all(
        self,
        workers: Sequence[WorkerRef],
        method_name: str,
        per_rank: PerRank,
        terms: Sequence[CallTerms],
    ) -> Sequence[Handle]:
        """Start a method on several workers at the same time, each with its own arguments and terms.

        A handle of this backend arrives as its value; a future arrives as a batch, which the worker reads from where it
        is stored. If an argument cannot be sent, raises before any worker is called.
        """
        ...

    def put(self, value: Any) -> Handle:
        """Store a value for use in several calls."""
        ...

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        """Wait for all values and return them in order."""
        ...

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait until the calls have finished, without reading results. Raises the error of a failed call."""
        ...

    def release(self, handles: Sequence[Handle]) -> None:
        """Release the values now; getting one afterwards is an error."""
        ...

    def running(self) -> Sequence[tuple[str, float]]:
        """Return the calls that are not in the trace because they run: worker, and start by `time.time()`."""
        ...

    def is_alive(self, worker: WorkerRef) -> bool:
        """Return whether the worker can take calls."""
        ...

    def shutdown(self, workers: Sequence[WorkerRef]) -> None:
        """Stop the workers. Stopping a worker twice is allowed; calling a stopped worker raises WorkerError."""
        ...

    def close(self) -> None:
        """Stop every worker and release all other resources; closing twice is allowed."""
        ...
