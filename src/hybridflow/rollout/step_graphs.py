"""Decoding steps as CUDA graphs, which outlive the sequences: each shape runs once as it is, then is captured."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridflow.models.forward import Forward
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.paged_kv_cache import PagedKVCache
from hybridflow.rollout.decoding_state import DecodingState, StepShape, decode_step
from hybridflow.runtime.device import free_device_memory

KEPT_SHARE = 0.01
"""Largest share of a GPU's memory that graphs hold while no sequence runs; if they need more, they are forgotten."""


class Graph(Protocol):
    """The operations of a step, on the memory that the step used when it was captured."""

    def replay(self) -> None:
        """Run the operations again."""
        ...


class GraphPool:
    """Captures CUDA graphs on a device, in one memory pool; `num_bytes` counts the memory that they hold."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._handle, self.num_bytes = device, torch.cuda.graph_pool_handle(), 0

    @property
    def is_small(self) -> bool:
        """Whether the graphs may stay while the memory is used for something else."""
        return self.num_bytes <= KEPT_SHARE * torch.cuda.get_device_properties(self._device).total_memory

    def capture(self, step: Callable[[], None]) -> Graph:
        """Return the graph of a step, which does not run."""
        graph, free = torch.cuda.CUDAGraph(), free_device_memory(self._device)
        # Other threads, such as one that saves a checkpoint, may allocate and wait meanwhile.
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            step()
        self.num_bytes += max(0, free - free_device_memory(self._device))
        return graph

    def wait(self) -> None:
        """Wait until the graphs have ended."""
        torch.cuda.synchronize(self._device)


def pools_of(device: torch.device, forward: Forward) -> Callable[[], GraphPool] | None:
    """Return what makes pools for graphs of this forward pass; None where its steps cannot be graphs."""
    return partial(GraphPool, device) if device.type == "cuda" and forward.is_capturable else None


class StepGraphs:
    """Runs steps of fixed shapes, as graphs if there is `new_pool`.

    The first step of a shape runs without a graph: it compiles kernels and allocates workspaces. The second one is
    captured. Graphs are used only as long as the memory that they read and write has the same addresses.
    """

    def __init__(self, new_pool: Callable[[], GraphPool] | None) -> None:
        self._new_pool = new_pool
        self._pool: GraphPool | None = None
        self._graphs: dict[Hashable, Graph | None] = {}  # None: has run without a graph
        self._addresses: list[int] = []

    def run(self, shape: Hashable, addresses: Callable[[], list[int]], step: Callable[[], None]) -> None:
        """Run the step of this shape on memory at these addresses."""
        self.require(addresses)
        if self._new_pool is None or shape not in self._graphs:
            self._graphs[shape] = None
            step()
            return
        graph = self._graphs[shape]
        if graph is None:
            self._pool = self._pool or self._new_pool()
            graph = self._graphs[shape] = self._pool.capture(step)
        graph.replay()

    def require(self, addresses: Callable[[], list[int]]) -> None:
        """Forget the graphs if they are of memory at other addresses."""
        if self._new_pool and (found := addresses()) != self._addresses:
            self.clear()
            self._addresses = found

    @property
    def num_captured(self) -> int:
        """The number of shapes that run as a graph."""
        return sum(graph is not None for graph in self._graphs.values())

    @property
    def is_small(self) -> bool:
        """Whether the graphs hold little memory."""
        return self._pool is None or self._pool.is_small

    def clear(self) -> None:
        """Forget all graphs, after the last one has ended."""
        if self._pool:
            self._pool.wait()
        self._graphs.clear()
        self._pool = None


class DecodingSteps:
    """The steps of an engine: buffers for up to `max_rows` rows and `num_steps` steps, and their graphs.

    They outlive the sequences and their pages, so that a shape is captured once, not in each generation. Graphs are
    made again when weights or buffers have moved.
    """

    def __init__(self, forward: Forward, model: PreTrainedModel, max_rows: int, num_steps: int) -> None:
        self.place = (model.device, model.dtype, max_rows)
        self._forward, self._model = forward, model
        log_prob_dtype = torch.promote_types(model.dtype, torch.float32)
        self.state = DecodingState(model.device, max_rows, num_steps, log_prob_dtype, forward.routes_shape)
        self.graphs = StepGraphs(pools_of(model.device, forward))
        self._weights: list[Tensor] = []
        self._page_addresses: Tensor | None = None

    def begin(self) -> None:
        """Let no row run, and list the model's tensors."""
        self.state.reset()
        self._weights = [*self._model.parameters(), *self._model.buffers()]

    def allocate(self, like: PrefillPlan, num_pages: int, num_scratch: int, num_rows: int) -> PagedKVCache:
        """Return a cache for the rows, whose addresses are where graphs look them up."""
        cache = PagedKVCache(like, num_pages, num_scratch, self._page_addresses, num_rows)
        self._page_addresses = cache.addresses
        return cache

    def run(self, cache: PagedKVCache, shape: StepShape) -> None:
        """Add one token to each running row among the first ones."""
        self.graphs.run(
            shape,
            lambda: [*self._addresses(), *cache.fixed_addresses],
            lambda: decode_step(self._forward, cache, self.state, shape),
        )

    def rest(self) -> None:
        """Give memory back while no sequence runs: the graphs stay if they can be replayed and hold little memory."""
        self.graphs.require(self._addresses)
        if not self.graphs.is_small:
            self.graphs.clear()

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self._weights, *self.state.buffers)]
