"""Import torch and tensordict in two thirds of the time. Importing this module before them has the effect."""

from collections.abc import Callable
from typing import TypeVar

from hybridflow.runtime.allocator import paused_collector

Function = TypeVar("Function", bound=Callable[..., object])


def _unmarked(function: Function) -> Function:
    return function


def _import_tensordict() -> None:
    """Import tensordict without torch.compile's tracer, which takes longer to import than torch itself.

    tensordict imports the tracer only to mark functions that it may keep in a compiled graph. hybridflow compiles no
    function that handles a batch.
    """
    import torch.compiler

    marks = torch.compiler.allow_in_graph, torch.compiler.assume_constant_result
    torch.compiler.allow_in_graph = torch.compiler.assume_constant_result = _unmarked
    try:
        import tensordict  # noqa: F401
    finally:
        torch.compiler.allow_in_graph, torch.compiler.assume_constant_result = marks


with paused_collector():
    _import_tensordict()
