"""The batches whose generation has begun on a rank, while its engine is ready to generate."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion, Request, RolloutEngine, RunningGroups
from hybridflow.rollout.running_groups import Group


class BegunBatches:
    """Batches that are generated in parts. `ready_to_generate()` is entered once for all batches that overlap.

    `between_steps`: see `RunningGroups`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        ready_to_generate: Callable[[], AbstractContextManager[None]],
        between_steps: Callable[[], None] = lambda: None,
    ) -> None:
        self._groups, self._ready_to_generate = RunningGroups(engine, between_steps), ready_to_generate
        self._prompts: dict[Hashable, DataProto] = {}
        self._request_ids = itertools.count()
        self._is_ready = ExitStack()

    def begin(self, batch: Hashable, prompts: DataProto, requests: Sequence[Request]) -> None:
        """Begin to generate a batch with one request for each prompt; see `RunningGroups.begin`."""
        if not self._groups:
            self._is_ready.enter_context(self._ready_to_generate())
        with self._leaving_when_empty():
            self._groups.begin(batch, [replace(each, request_id=next(self._request_ids)) for each in requests])
        self._prompts[batch] = prompts

    def next(self, batch: Hashable, count: int) -> tuple[DataProto, list[Completion]]:
        """Return the `count` prompts that finish next and their completions; see `RunningGroups.next`."""
        return self._taken(batch, self._next(batch, count))

    def rest(self, batch: Hashable) -> tuple[DataProto, list[Completion]]:
        """Return the prompts that were not returned yet, in the order of the batch, and their completions."""
        groups = self._next(batch, max(1, self._groups.num_left(batch)))
        return self._taken(batch, sorted(groups, key=lambda group: group[0]))

    def next_of_any(self, count: int) -> tuple[list[Any], DataProto, list[Completion]]:
        """Return the `count` prompts of any batches that finish next, their batches and completions, in that order."""
        with self._leaving_when_empty():
            groups = self._groups.next_of_any(count)
        rows = [_without_noise_key(self._prompts[batch]).select_idxs([index]) for batch, (index, _) in groups]
        self._prompts = {batch: prompts for batch, prompts in self._prompts.items() if batch in self._groups}
        completions = [completion for _, (_, group) in groups for completion in group]
        return [batch for batch, _ in groups], DataProto.concat(rows), completions

    def give_waiting(self, batch: Hashable, share: float) -> list[int]:
        """Give up a share of the groups that wait, see `RunningGroups.give_waiting`; return their `group_ids`."""
        return self._prompts[batch].batch["group_ids"][self._groups.give_waiting(batch, share)].tolist()

    def __contains__(self, batch: Hashable) -> bool:
        """Return whether the batch has begun and has groups that were not returned yet."""
        return batch in self._groups

    def abandon(self) -> None:
        """Abort all requests and forget the batches."""
        with self._leaving_when_empty():
            self._groups.abandon()
        self._prompts.clear()

    def step(self) -> None:
        """Step the engine once, if sequences run, and keep what finishes."""
        with self._leaving_when_empty():
            self._groups.step()

    def _next(self, batch: Hashable, count: int) -> list[Group]:
        with self._leaving_when_empty():
            return self._groups.next(batch, count)

    def _taken(self, batch: Hashable, groups: Sequence[Group]) -> tuple[DataProto, list[Completion]]:
        prompts = self._prompts[batch].select_idxs([index for index, _ in groups])
        if batch not in self._groups:
            del self._prompts[batch]
        return prompts, [completion for _, group in groups for completion in group]

    @contextmanager
    def _leaving_when_empty(self) -> Iterator[None]:
        try:
            yield
        finally:
            if not self._groups:
                self._is_ready.close()


def _without_noise_key(prompts: DataProto) -> DataProto:
    """Return the prompts without the key of their batch, in which batches differ."""
    return prompts.select(meta_info_keys=[key for key in prompts.meta_info if key != "noise_key"])
