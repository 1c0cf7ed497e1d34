"""Groups of responses as they finish: requests of several batches run in one engine, and each batch is read in parts.

A part holds the groups of its batch that finish next. Which these are depends on the lengths of responses, not on time.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import Completion, Request, RolloutEngine

Group = tuple[int, list[Completion]]
"""The index of a request in its batch, and its completions by index."""


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    """Serve all requests with an idle engine; return the completions by order of requests and index in the group.

    The longest requests start first, so that few sequences run alone at the end. Raises RolloutError if the engine is
    not idle, or if a request is invalid, and leaves the engine idle.
    """
    if engine.has_unfinished():
        raise RolloutError(
            "generate needs an idle engine, but requests are waiting or running; finish or abort them first."
        )
    engine.finished()  # of earlier requests, for example aborted ones
    groups = RunningGroups(engine)
    groups.begin("", requests)
    done = groups.next("", len(requests)) if requests else []
    return [completion for _, group in sorted(done, key=lambda group: group[0]) for completion in group]


@dataclass
class _RunningBatch:
    remaining: int  # groups that were not returned yet
    finished: list[Group] = field(default_factory=list)  # of these, in order


@dataclass
class _RunningGroup:
    batch: Hashable
    index: int
    group_size: int
    done: list[Completion] = field(default_factory=list)


class RunningGroups:
    """The groups of the batches that have begun in an engine, which serves no other requests.

    `between_steps` is called after each step; it may begin batches and load weights.
    """

    def __init__(self, engine: RolloutEngine, between_steps: Callable[[], None] = lambda: None) -> None:
        self._engine, self._between_steps = engine, between_steps
        self._batches: dict[Hashable, _RunningBatch] = {}
        self._running: dict[int, _RunningGroup] = {}  # by the id of the request

    def __bool__(self) -> bool:
        """Return whether a batch has groups that were not returned yet."""
        return bool(self._batches)

    def __contains__(self, batch: Hashable) -> bool:
        """Return whether the batch has groups that were not returned yet."""
        return batch in self._batches

    def begin(self, batch: Hashable, requests: Sequence[Request]) -> None:
        """Submit the requests of a batch, the longest first; ids are unique over all batches that run.

        Raises RolloutError for an invalid request, or for a batch that has begun; then none of them runs.
        """
        if batch in self._batches:
            raise RolloutError(f"batch {batch!r} has begun already; read all of its groups first.")
        submitted: list[int] = []
        try:
            for index in sorted(range(len(requests)), key=lambda index: longest_first(requests[index])):
                request = requests[index]
                self._engine.submit(request)
                submitted.append(request.request_id)
                self._running[request.request_id] = _RunningGroup(batch, index, request.group_size)
        except BaseException:
            self._abort(submitted)
            raise
        if requests:
            self._batches[batch] = _RunningBatch(len(requests))

    def abandon(self) -> None:
        """Abort the requests of all batches, and forget them."""
        self._abort(list(self._running))
        self._batches.clear()

    def next(self, batch: Hashable, count: int) -> list[Group]:
        """Step the engine until `count` more groups of the batch have finished; return them in that order.

        Raises RolloutError if fewer are left, and the errors of the engine; after these no batch is left.
        """
        held = self._batches.get(batch, _RunningBatch(0))
        if held.remaining < count:
            raise RolloutError(f"batch {batch!r} has {held.remaining} groups left, fewer than {count}.")
        try:
            while len(held.finished) < count:
                self.step()
        except BaseException:
            self.abandon()
            raise
        taken, held.finished = held.finished[:count], held.finished[count:]
        held.remaining -= count
        if not held.remaining:
            self._batches.pop(batch, None)
        return taken

    def num_left(self, batch: Hashable) -> int:
        """Return the number of groups of a batch that were not returned yet."""
        return self._batches[batch].remaining if batch in self._batches else 0

    def step(self) -> None:
        """Step the engine once, and keep the groups that finish."""
        self._engine.step()
        self._take_finished()
        self._between_steps()

    def _take_finished(self) -> None:
        """Take what the engine has finished, also what a load of weights or its probe has; ignore aborted requests."""
        for completion in self._engine.finished():
            running = self._running.get(completion.request_id)
            if running is None:
                continue
            running.done.append(completion)
            if len(running.done) == running.group_size:
                del self._running[completion.request_id]
                group = sorted(running.done, key=lambda done: done.index)
                self._batches[running.batch].finished.append((running.index, group))

    def _abort(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            with suppress(RolloutError):  # finished
                self._engine.abort(request_id)
            del self._running[request_id]
        self._take_finished()  # an abort may also end requests of other batches


def longest_first(request: Request) -> tuple[int, int]:
    """Return the key of the order in which requests start."""
    return -request.sampling.max_new_tokens, -len(request.prompt_ids)
