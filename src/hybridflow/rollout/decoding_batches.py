"""Decoding in batches of equal sampling parameters, with the keys and values of a row side by side."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from hybridflow.errors import RolloutConfigError
from hybridflow.models.forward import Forward
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.rollout.base import Completion, Request, SamplingParams
from hybridflow.rollout.decoding_batch import DecodingBatch
from hybridflow.rollout.kept_sequences import KeptSequence, KeptSequences
from hybridflow.rollout.parked_rows import ParkedRow
from hybridflow.rollout.requests import StopStrings, longest_of

Rows = tuple[int, int]
"""A number of rows, and the tokens that each has room for."""


class CacheBudget:
    """A limit of `num_bytes` for keys, values and states; 0: none. When rows are added, old ones are there twice."""

    def __init__(self, forward: Forward, device: torch.device, num_bytes: int) -> None:
        self._forward, self._device, self._num_bytes = forward, device, num_bytes
        self._sizes: tuple[Counter[int | None], int] | None = None  # see `_measure`

    def holds(
        self,
        running: Mapping[SamplingParams, Rows],
        new: Mapping[SamplingParams, Iterable[Request]],
        kept: Sequence[int] = (),
    ) -> bool:
        """Return whether the rows that run and the new requests fit; rows of equal sampling have equal room.

        `kept`: the room of kept sequences beside them. Raises RolloutConfigError if nothing runs, nothing is kept and a
        single new request does not fit.
        """
        if not self._num_bytes:
            return True
        requests = [request for of_sampling in new.values() for request in of_sampling]
        wanted = dict(running)
        for sampling, of_sampling in new.items():
            for request in of_sampling:
                rows, room = wanted.get(sampling, (0, 0))
                wanted[sampling] = rows + request.group_size, max(room, longest_of(request))
        needed = sum(map(self._row_bytes, kept)) + sum(rows * self._row_bytes(room) for rows, room in wanted.values())
        if needed > self._num_bytes and not running and not kept and len(requests) == 1:
            raise RolloutConfigError(
                f"request {requests[0].request_id}: its {requests[0].group_size} sequences need {needed} bytes of keys "
                f"and values; raise rollout.kv_cache_bytes={self._num_bytes} (0: no limit), or lower "
                "rollout.group_size or data.max_response_length."
            )
        return needed <= self._num_bytes

    def _row_bytes(self, room: int) -> int:
        """Return the bytes of a row that has room for so many tokens."""
        tokens, states = self._sizes = self._sizes or self._measure()
        return states + sum(size * min(room, window or room) for window, size in tokens.items())

    def _measure(self) -> tuple[Counter[int | None], int]:
        """Return the bytes of a token in the layers of each window, and of a row's states, by a pass over one token."""
        like, zero = PrefillPlan([1]), torch.zeros(1, 1, dtype=torch.int64, device=self._device)
        self._forward(zero, position_ids=zero, attention_plan=like)
        tokens = Counter[int | None]()
        for layer, form in like.forms.items():
            tokens[form.window] += like.keys[layer].nbytes + like.values[layer].nbytes
        return tokens, sum(states.nbytes for states in like.states.values())


class DecodingBatches:
    """Running sequences, where those with equal sampling parameters, except their lengths, are one batch."""

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        dtype: torch.dtype,
        stop_strings: StopStrings,
        kept: KeptSequences[ParkedRow],
        kv_cache_bytes: int = 0,
    ) -> None:
        self._kept = kept
        self._budget = CacheBudget(forward, device, kv_cache_bytes)
        self._forward, self._device, self._dtype, self._stop_strings = forward, device, dtype, stop_strings
        self._batches: list[DecodingBatch] = []

    @property
    def num_running(self) -> int:
        """The number of sequences that run."""
        return sum(batch.num_running for batch in self._batches)

    def admit(self, waiting: deque[Request], room: int) -> None:
        """Start waiting requests that fit, in order. Raises RolloutConfigError for one that memory never holds."""
        running, taken = self._running_rows(), dict[int, KeptSequence[ParkedRow]]()
        admitted: dict[SamplingParams, list[Request]] = {}  # by sampling parameters, without the length
        while waiting and waiting[0].group_size <= room:
            request = waiting[0]
            of_sampling = admitted.setdefault(replace(request.sampling, max_new_tokens=1), [])
            of_sampling.append(request)
            if not self._budget.holds(running, admitted):
                of_sampling.pop()
                break
            room -= waiting.popleft().group_size
            if kept := self._kept.take(request.prompt_ids):
                taken[request.request_id] = kept
        self._limit_kept(admitted)
        for sampling, requests in ((each, requests) for each, requests in admitted.items() if requests):
            batch = next((batch for batch in self._batches if batch.sampling == sampling), None)
            if batch is None:
                shared = (self._stop_strings, self._kept)
                batch = DecodingBatch(self._forward, self._device, self._dtype, sampling, *shared)
                self._batches.append(batch)
            batch.admit(requests, taken)

    def advance(self, version: int) -> list[Completion]:
        """Add one token to every sequence; return the completions that end with it."""
        num_kept = len(self._kept)
        running = [batch for batch in self._batches if batch.num_running]
        done = self._without_empty([done for batch in running for done in batch.advance(version)])
        if len(self._kept) > num_kept:
            self._limit_kept({})
        return done

    def abort(self, request_id: int) -> list[Completion]:
        """End the sequences of a request, and return them with their tokens so far."""
        return self._without_empty([done for batch in self._batches for done in batch.abort(request_id)])

    def retract(self) -> list[Completion]:
        """Compute all keys and values again; return no completions."""
        for batch in self._batches:
            batch.retract()
        return []

    def use_new_weights(self) -> None:
        """Do not keep running sequences, unless they are retracted; each step reads the model."""
        for batch in self._batches:
            batch.use_new_weights()

    def _running_rows(self) -> dict[SamplingParams, Rows]:
        return {batch.sampling: (batch.num_rows, batch.capacity) for batch in self._batches}

    def _limit_kept(self, new: Mapping[SamplingParams, list[Request]]) -> None:
        """Drop the oldest kept sequences that do not fit beside the rows that run, once finished rows are removed."""
        is_compact = False
        while self._kept:
            kept = [parked.rows.cache.capacity for parked in self._kept.storages]
            if self._budget.holds(self._running_rows(), new, kept):
                return
            if is_compact:
                self._kept.drop_oldest()
                continue
            for batch in self._batches:
                batch.remove_finished()
            is_compact = True

    def _without_empty(self, done: list[Completion]) -> list[Completion]:
        self._batches = [batch for batch in self._batches if batch.num_running or batch.num_parked]
        return done
