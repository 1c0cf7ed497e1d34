"""A worker group whose every call returns a future at once, so that the loop reads like the algorithm and independent
stages run at the same time. How long each took is told by the trace.
"""

from collections.abc import Callable

from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProtoFuture


class StageCalls:
    """`calls.method(...)` is `group.method.remote(...)`."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., DataProtoFuture]:
        return getattr(self._group, name).remote
