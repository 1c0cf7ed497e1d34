"""Decoding in batches of equal sampling parameters, with the keys and values of a row side by side."""

from collections import deque
from dataclasses import replace

import torch

from hybridflow.models import Forward
from hybridflow.rollout.base import Completion, Request, SamplingParams
from hybridflow.rollout.cache_budget import CacheBudget
from hybridflow.rollout.decoding_batch import DecodingBatch
from hybridflow.rollout.stop_strings import StopStrings


class DecodingBatches:
    """Running sequences, where those with equal sampling parameters, except their lengths, are one batch."""

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        stop_strings: StopStrings,
        kv_cache_bytes: int = 0,
    ) -> None:
        self._budget = CacheBudget(forward, device, kv_cache_bytes)
        self._forward, self._device, self._dtype, self._stop_strings = forward, device, dtype, stop_strings
        self._batches: list[DecodingBatch] = []

    @property
    def num_running(self) -> int:
        """The number of sequences that run."""
        return sum(batch.num_running for batch in self._batches)

    def admit(self, waiting: deque[Request], room: int) -> None:
        """Start waiting requests that fit, in order. Raises RolloutConfigError for one that memory never holds."""
        running = {batch.sampling: (batch.num_rows, batch.capacity) for batch in self._batches}
        admitted: dict[SamplingParams, list[Request]] = {}  # by sampling parameters, without the length
        while waiting and waiting[0].group_size <= room:
            request = waiting[0]
            of_sampling = admitted.setdefault(replace(request.sampling, max_new_tokens=1), [])
            of_sampling.append(request)
            if not self._budget.holds(running, admitted):
                of_sampling.pop()
                break
            room -= waiting.popleft().group_size
        for sampling, requests in ((each, requests) for each, requests in admitted.items() if requests):
            batch = next((batch for batch in self._batches if batch.sampling == sampling), None)
            if batch is None:
                batch = DecodingBatch(self._forward, self._device, self._dtype, sampling, self._stop_strings)
                self._batches.append(batch)
            batch.admit(requests)

    def advance(self, version: int) -> list[Completion]:
        """Add one token to every sequence; return the completions that end with it."""
        return self._without_empty([done for batch in self._batches for done in batch.advance(version)])

    def abort(self, request_id: int) -> list[Completion]:
        """End the sequences of a request, and return them with their tokens so far."""
        return self._without_empty([done for batch in self._batches for done in batch.abort(request_id)])

    def retract(self) -> list[Completion]:
        """Compute all keys and values again; return no completions."""
        for batch in self._batches:
            batch.retract()
        return []

    def use_new_weights(self) -> None:
        """Do nothing: each step reads the model."""

    def _without_empty(self, done: list[Completion]) -> list[Completion]:
        self._batches = [batch for batch in self._batches if batch.num_running]
        return done
