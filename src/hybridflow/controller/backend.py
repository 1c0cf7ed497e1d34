"""`Backend`: what a worker group needs of the thing that runs its workers. `local.py` runs them in this process;
others have a process for each. Workers and handles are opaque to everybody else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.controller.class_with_init_args import ClassWithInitArgs
from hybridflow.controller.columns import MethodColumns
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.observability import Trace
from hybridflow.protocol import Handle


@dataclass(frozen=True)
class CallTerms:
    """What was declared of a call, beyond its arguments.

    `columns`: the method's declaration, checked against what it returns. `num_rows`: rows of the part that this rank
    gets; None if no batch is split. `is_read`: whether anybody will read the result; if not, it is not kept.
    `opens_futures`: whether the method gets batches for futures.
    """

    columns: MethodColumns | None = None
    num_rows: int | None = None
    is_read: bool = True
    opens_futures: bool = True


NO_TERMS = CallTerms()

PerRank = Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
"""(args, kwargs) of each rank."""


class WorkerRef(Protocol):
    """A worker somewhere."""

    @property
    def name(self) -> str:
        """Unique among living workers: the name of the group, "/", the rank."""
        ...


class Backend(Protocol):
    """Runs workers. A worker owns what it receives, and the caller what it gets: everything is a private copy.

    The error of a worker keeps its type if it is a HybridFlowError and is a WorkerError otherwise. It is raised by
    `call_all` if the call runs at once, by `get` and `wait` if it does not.
    """

    @property
    def trace(self) -> Trace:
        """Calls and transfers so far, as far as they are known to have ended."""
        ...

    def check_fit(self, resource_pools: Sequence[ResourcePool]) -> None:
        """Raise ConfigError, before anything is started, unless all these pools fit together what there is."""
        ...

    def spawn(
        self, classes: Mapping[str, ClassWithInitArgs], resource_pool: ResourcePool
    ) -> Mapping[str, Sequence[WorkerRef]]:
        """Start one process for each rank of the pool, with the standard SPMD environment variables set, and in each
        an object of every class. The keys are names of groups; of each, the workers in order of rank. Fails as a
        whole: if one constructor raises, none stays."""
        ...

    def call_all(
        self,
        workers: Sequence[WorkerRef],
        method_name: str,
        per_rank: PerRank,
        terms: Sequence[CallTerms],
    ) -> Sequence[Handle]:
        """Start a method on several workers at the same time, each with its own arguments and terms.

        An argument that is a handle of this backend arrives as its value; a future, as the batch that the worker reads
        from where it is. Raises for arguments that cannot be sent before any worker is called.
        """
        ...

    def put(self, value: Any) -> Handle:
        """Keep a value for several calls."""
        ...

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        """The values, in order, waiting for all of them."""
        ...

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait until the calls have finished, without reading results. Raises what a call raised."""
        ...

    def release(self, handles: Sequence[Handle]) -> None:
        """Let the values go now; getting them afterwards is an error."""
        ...

    def is_alive(self, worker: WorkerRef) -> bool:
        """Whether the worker can take calls."""
        ...

    def shutdown(self, workers: Sequence[WorkerRef]) -> None:
        """Stop the workers. Stopping one twice is no error; calling a stopped one is a WorkerError."""
        ...

    def close(self) -> None:
        """Stop every worker and let go of everything else; closing twice is no error."""
        ...
