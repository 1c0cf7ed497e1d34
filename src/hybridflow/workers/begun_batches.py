"""The batches whose generation has begun on a rank, while its engine is ready to generate."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

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
