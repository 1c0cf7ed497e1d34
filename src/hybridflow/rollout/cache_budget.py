"""The memory that keys and values of rows side by side may take, on a CPU."""

from collections.abc import Iterable, Mapping

import torch

from hybridflow.errors import RolloutConfigError
from hybridflow.models import Forward
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache
from hybridflow.rollout.base import Request, SamplingParams
from hybridflow.rollout.requests import longest_of

Rows = tuple[int, int]
"""A number of rows, and the tokens that each has room for."""


class CacheBudget:
    """A limit of `num_bytes` for keys and values; 0: none. While rows are added, old rows are in memory twice."""

    def __init__(self, forward: Forward, device: torch.device, num_bytes: int) -> None:
        self._forward, self._device, self._num_bytes = forward, device, num_bytes
        self._token_bytes = 0

    def holds(
        self,
        running: Mapping[SamplingParams, Rows],
        new: Mapping[SamplingParams, Iterable[Request]],
        num_kept: int = 0,
    ) -> bool:
        """Return whether the rows that run and the new requests fit; rows of equal sampling have equal room.

        `num_kept`: tokens of kept sequences beside them. Raises RolloutConfigError if nothing runs, nothing is kept
        and a single new request does not fit.
        """
        if not self._num_bytes:
            return True
        self._token_bytes = self._token_bytes or self._measure()
        requests = [request for of_sampling in new.values() for request in of_sampling]
        wanted = dict(running)
        for sampling, of_sampling in new.items():
            for request in of_sampling:
                rows, room = wanted.get(sampling, (0, 0))
                wanted[sampling] = rows + request.group_size, max(room, longest_of(request))
        needed = self._token_bytes * (num_kept + sum(rows * room for rows, room in wanted.values()))
        if needed > self._num_bytes and not running and not num_kept and len(requests) == 1:
            raise RolloutConfigError(
                f"request {requests[0].request_id}: its {requests[0].group_size} sequences need {needed} bytes of keys "
                f"and values; raise rollout.kv_cache_bytes={self._num_bytes} (0: no limit), or lower "
                "rollout.group_size or data.max_response_length."
            )
        return needed <= self._num_bytes

    def _measure(self) -> int:
        """Return the bytes of one token in all layers, by a forward pass over one token."""
        like, zero = PrefillPlan([1]), torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._forward(zero, position_ids=zero, attention_plan=like)
        return PagedKVCache.page_bytes(like) // PAGE_SIZE
