"""How much memory the pages and states of decoding in pages get."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridflow.errors import RolloutConfigError
from hybridflow.models.forward import Forward
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.paged_kv_cache import PagedKVCache, pages_of
from hybridflow.rollout.base import Request
from hybridflow.rollout.running_row import final_length, most_pages
from hybridflow.rollout.step_graphs import DecodingSteps
from hybridflow.runtime.device import free_device_memory

HOST_MEMORY = 2**30
"""Memory of keys and values on a CPU, in bytes."""


@dataclass(frozen=True)
class PageMemory:
    """The memory of keys, values and states: `num_bytes`; 0: the share `share` of the memory that is free."""

    num_bytes: int
    share: float

    def allocate(
        self,
        forward: Forward,
        device: torch.device,
        steps: DecodingSteps,
        waiting: Sequence[Request],
        row_sizes: Sequence[int],
    ) -> PagedKVCache:
        """Allocate pages for as many of the longest waiting sequence as may run, but at most what memory allows.

        If a sequence is to be kept, allocate all that memory allows: later prompts are longer. States are those of the
        largest of `row_sizes` whose rows all have pages for the longest sequence; other models have all rows. Raises
        RolloutConfigError if the first request does not fit.
        """
        like, zero = PrefillPlan([1]), torch.zeros(1, 1, dtype=torch.int64, device=device)
        forward(zero, position_ids=zero, attention_plan=like)
        page_bytes, num_scratch = PagedKVCache.page_bytes(like), pages_of(row_sizes[-1])
        state_bytes = sum(states.nbytes for states in like.states.values())
        is_cuda = device.type == "cuda"
        budget = self.num_bytes or (int(self.share * free_device_memory(device)) if is_cuda else HOST_MEMORY)
        request, needed = waiting[0], most_pages(waiting[0])
        longest = max(pages_of(final_length(request)) for request in waiting)
        rows = row_sizes[-1]
        if state_bytes:
            most = (budget - num_scratch * page_bytes) // (state_bytes + longest * page_bytes)
            rows = max(size for size in row_sizes if size <= max(most, 1))
            rows = max(rows, min(size for size in row_sizes if size >= request.group_size))
        num_pages = (budget - rows * state_bytes) // max(1, page_bytes) - num_scratch
        if state_bytes or not any(request.keep for request in waiting):
            num_pages = min(max(rows * longest, needed), num_pages)
        fixed = num_scratch * page_bytes + rows * state_bytes
        if num_pages < needed:
            raise RolloutConfigError(
                f"request {request.request_id}: {request.group_size} sequences of up to {final_length(request)} tokens "
                f"need {needed * page_bytes + fixed} bytes of keys and values, but {budget} are allowed; raise "
                f"rollout.kv_cache_bytes={self.num_bytes} (0: rollout.gpu_memory_utilization="
                f"{self.share} of the free memory), or lower data.max_response_length."
            )
        try:
            return steps.allocate(like, num_pages, num_scratch, rows)
        except torch.OutOfMemoryError as error:
            raise RolloutConfigError(
                f"{num_pages * page_bytes + fixed} bytes of keys and values do not fit into the free memory of "
                f"{device}; lower rollout.kv_cache_bytes={self.num_bytes} (0: "
                f"rollout.gpu_memory_utilization={self.share}), or use memory.offload to free the trainer's."
            ) from error
