"""CUDA graphs of decoding steps: each shape runs once as it is, then is captured and replayed."""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class StepGraphs:
    """Runs steps of fixed shapes on buffers of fixed address; with `captures`, as CUDA graphs in one memory pool.

    The first step of a shape runs without a graph: it compiles kernels and allocates workspaces. The second one is
    captured. `clear` is required when an address changes that a step uses.
    """

    def __init__(self, captures: bool) -> None:
        self._captures = captures
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: has run without a graph
        self._pool: Any = None

    def run(self, shape: Hashable, step: Callable[[], None]) -> None:
        """Run the step of this shape."""
        if not self._captures or shape not in self._graphs:
            self._graphs[shape] = None
            step()
            return
        graph = self._graphs[shape]
        if graph is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as one that saves a checkpoint, may allocate and wait meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
            self._graphs[shape] = graph
        graph.replay()

    @property
    def num_captured(self) -> int:
        """The number of shapes that run as a graph."""
        return sum(graph is not None for graph in self._graphs.values())

    def clear(self) -> None:
        """Forget all graphs, after the last one has ended."""
        if self.num_captured:
            torch.cuda.synchronize()
        self._graphs.clear()
        self._pool = None
