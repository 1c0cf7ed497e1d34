"""Runs a user's reward function in separate processes: the run continues if one hangs, crashes or is killed.

    samples ──pickle──> process ──> function ──> result ──JSON──> in the order of the samples

A process gets its next sample before it has answered the current one, so that it is never idle; a process with an
`async` function gets many at a time. A process that does not answer in time is killed and replaced. Its current sample
has failed and its next one goes to another process. If it was working on many samples, each of them is retried alone.
What a process did that has ended, its sample or its start, is retried, since it may have been killed from outside.

Samples that were submitted later run beside earlier ones, whether something waits for them or not.
"""

import asyncio
import concurrent.futures
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from hybridflow.environments.processes.arguments import RewardKind, as_batch, num_samples_of
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.processes.pool import ProcessPool, resolved, weakly
from hybridflow.environments.processes.user_process import LostError, UserProcess
from hybridflow.environments.rewards.outcome import OnOutcome, Outcome, split
from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.runtime.progress import note_progress

IN_FLIGHT = 2
"""Samples that a process has at a time: the current one and the next."""

GRACE_S = 5.0
"""Seconds beyond the timeout before a process with an async function, which applies the timeout itself, is killed."""

Sample = tuple[int, Mapping[str, Any]]
"""A seed and the keyword arguments."""


class Submitted:
    """Samples that were submitted together, and the future of their outcomes, in order."""

    def __init__(self, samples: Sequence[Sample], on_outcome: OnOutcome | None) -> None:
        self.samples, self._on_outcome = samples, on_outcome
        self._known: dict[int, Outcome] = {}
        self.outcomes: concurrent.futures.Future[list[Outcome]] = concurrent.futures.Future()

    def record(self, number: int, outcome: Outcome) -> None:
        """Store the outcome of a sample and pass it to the callback, whose error is that of all samples."""
        if self.outcomes.done():
            return
        self._known[number] = outcome
        note_progress()
        try:
            if self._on_outcome:
                self._on_outcome(number, outcome)
        except BaseException as error:  # `wait` raises it
            self.fail(error)
        self.end_if_complete()

    def end_if_complete(self) -> None:
        """Let `wait` return if all outcomes are known."""
        if len(self._known) == len(self.samples) and not self.outcomes.done():
            self.outcomes.set_result([self._known[number] for number in range(len(self.samples))])

    def fail(self, error: BaseException) -> None:
        """Let `wait` raise an error, unless all outcomes are known."""
        if not self.outcomes.done():
            self.outcomes.set_exception(error)


@dataclass(eq=False)
class _Call:
    """A sample to be scored. `is_suspect`: a process was lost with it, so that it is tried alone."""

    submitted: Submitted
    number: int
    is_suspect: bool = False

    @property
    def sample(self) -> Sample:
        return self.submitted.samples[self.number]

    def record(self, outcome: Outcome) -> None:
        self.submitted.record(self.number, outcome)


class _RewardProcess(UserProcess):
    """A process with the function, and the samples that it has."""

    def __init__(self) -> None:
        super().__init__("reward")
        self.calls: list[_Call] = []  # the current one first
        self.last: _Call | None = None  # that it has answered

    def may_have(self, call: _Call, in_flight: int) -> bool:
        """Return whether the process may get this sample; a suspect is tried alone."""
        if not self.calls:
            return self.is_alive
        if self.is_lost or len(self.calls) >= in_flight:
            return False
        return not (call.is_suspect or any(other.is_suspect for other in self.calls))


class RewardRunner(ProcessPool[_RewardProcess]):
    """Pool of `num_processes` processes that run the function `name`, until `close` or the end of this process.

    The function is called with the four arguments of each sample and `kwargs`. An `async` function works on
    `concurrency` samples at a time in each process. A function with the arguments data_sources, solution_strs,
    ground_truths and extra_infos is called once with the lists of all samples and returns a list. `closure`: the
    function itself, if a Python program holds it. Raises RewardError if the processes cannot load the function.
    """

    not_loaded, failed_start = RewardConfigError, RewardError

    def __init__(
        self,
        name: str,
        *,
        num_processes: int,
        timeout_s: float | None,
        memory_bytes: int,
        kwargs: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        closure: Closure | None = None,
    ) -> None:
        self.name, self.kwargs, self._num_processes = name, dict(kwargs or {}), num_processes
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self._late = f"took longer than reward.timeout_s={timeout_s}"
        self.kind = RewardKind()
        self._is_known = False  # whether a process has reported the kind of the function
        file = resolved(name)
        settings = {
            "what": f"reward function '{name}'",
            "sources": [file],
            "reward": (file, self.kwargs),
            "closures": {file: closure} if closure else {},
            "memory_bytes": memory_bytes,
            "timeout_s": timeout_s,
        }
        self._waiting: deque[_Call] = deque()  # samples that no process has
        self._serving: list[_RewardProcess] = []  # that were ready and are not known to be lost
        self._starts: set[asyncio.Task[None]] = set()
        self._on_answer, self._on_loss = weakly(self._answered), weakly(self._lost)
        super().__init__("rewards", settings, RewardKind)

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcome of each sample, in order."""
        self.start()
        if self.kind.takes_batches and samples:
            return split(self.wait(self.submit([batch_of(samples)]))[0], len(samples))
        return self.wait(self.submit(samples))

    def submit(self, samples: Sequence[Sample], on_outcome: OnOutcome | None = None) -> Submitted:
        """Give samples, or a `batch_of` samples, to the processes, for `wait`.

        `on_outcome` gets each outcome at once; it is called in the thread of the event loop.
        """
        submitted = Submitted(samples, on_outcome)
        submitted.end_if_complete()
        try:
            self.loop.call_soon_threadsafe(self._add, submitted)
        except RuntimeError as error:
            raise self._closed() from error
        if self.is_closed:  # the loop may have stopped before
            submitted.fail(self._closed())
        return submitted

    def wait(self, submitted: Submitted) -> list[Outcome]:
        """Return the outcome of each submitted sample, in order; an error leaves what others have submitted."""
        try:
            return submitted.outcomes.result()
        except BaseException as error:  # also a KeyboardInterrupt
            with suppress(RuntimeError):  # the runner was closed
                self.loop.call_soon_threadsafe(self._withdraw, submitted, error)
            raise

    def start(self) -> None:
        """Start a process to learn the kind of the function, unless it is known."""
        if not self._is_known:
            self._run(self._learn())

    async def _learn(self) -> None:
        await (next(iter(self._starts), None) or self._begin_start())

    async def _start(self) -> None:
        """Start a process and give it samples. Raises RewardError if the function cannot be loaded."""
        process, self.kind = await self._started(_RewardProcess)
        self._is_known = True
        process.answers_in_order = not self.kind.is_async
        self._serving.append(process)
        process.lost.add_done_callback(partial(self._on_loss, process))
        self._feed()

    def _add(self, submitted: Submitted) -> None:
        self._waiting += [_Call(submitted, number) for number in range(len(submitted.samples))]
        self._feed()

    def _withdraw(self, submitted: Submitted, error: BaseException) -> None:
        """Fail all samples that were submitted, and end the processes that work on some of them."""
        submitted.fail(error)
        for process in self._serving:
            if any(call.submitted is submitted for call in process.calls):
                process.lose("works on what nothing waits for", "ended")

    def _fail_all(self, error: BaseException) -> None:
        held = [call for process in self._serving for call in process.calls]
        for call in [*self._waiting, *held]:
            call.submitted.fail(error)

    def _feed(self) -> None:
        """Give waiting samples to the processes that may have them, and start processes that are missing."""
        if self.is_closed:
            self._fail_all(self._closed())
            return
        in_flight = self._concurrency if self.kind.is_async else IN_FLIGHT
        while self._waiting:
            call = self._waiting[0]
            if not call.submitted.outcomes.done():
                free = [process for process in self._serving if process.may_have(call, in_flight)]
                if not free:
                    break
                self._give(min(free, key=lambda process: len(process.calls)), call)
            self._waiting.popleft()
        num_running = len(self._serving) + len(self._starts)
        if num_running < self._num_processes:
            num_samples = len(self._waiting) + sum(len(process.calls) for process in self._serving)
            for _ in range(num_running, min(self._num_processes, num_samples)):
                self._begin_start()

    def _begin_start(self) -> "asyncio.Task[None]":
        start = self.loop.create_task(self._start())
        self._starts.add(start)
        start.add_done_callback(self._end_start)
        return start

    def _end_start(self, start: "asyncio.Task[None]") -> None:
        self._starts.discard(start)
        if start.cancelled():
            self._fail_all(self._closed())
        elif error := start.exception():
            self._fail_all(error)

    def _give(self, process: _RewardProcess, call: _Call) -> None:
        seed, arguments = call.sample
        try:
            process.ask(Outcome.of_message, partial(self._on_answer, process, call), seed, dict(arguments))
        except Exception as error:  # of any type: the sample cannot be pickled
            call.submitted.fail(error)
            return
        process.calls.append(call)
        if self.kind.is_async or len(process.calls) == 1:
            self._limit_time(process)

    def _limit_time(self, process: _RewardProcess) -> None:
        """Begin the time of the current sample; an async function has all samples at a time."""
        if not self._timeout_s:
            return
        calls = islice(process.calls, None if self.kind.is_async else 1)
        num_samples = max((num_samples_of(call.sample[1]) for call in calls), default=0)
        seconds = self._timeout_s * num_samples + (GRACE_S if self.kind.is_async else 0.0)
        process.set_time_limit(seconds if num_samples else None, self._late)

    def _answered(self, process: _RewardProcess, call: _Call, outcome: Outcome) -> None:
        process.calls.remove(call)
        process.last = call
        call.record(outcome)
        self._limit_time(process)
        self._feed()

    def _lost(self, process: _RewardProcess, lost: "asyncio.Future[LostError]") -> None:
        """Let the current sample of a lost process fail, or try it again; the others go to other processes.

        If the process has answered a sample twice, that sample has failed instead.
        """
        error, calls = lost.result(), process.calls
        self._serving.remove(process)
        if error.reason == "wrong reply" and not calls and not process.last:
            self._fail_all(self._import_error(error))
        elif error.reason in ("ended", "closed") or not (calls or process.has_repeated):
            pass
        elif process.has_repeated and process.last:
            process.last.record(Outcome(None, "died", str(error)))
        elif self.kind.is_async and len(calls) > 1:  # it was working on all of them
            for call in calls:
                call.is_suspect = True
        elif error.reason == "exited" and not calls[0].is_suspect:
            calls[0].is_suspect = True
        else:
            calls.pop(0).record(Outcome(None, "timeout" if error.reason == "late" else "died", str(error)))
        self._waiting.extendleft(reversed(calls))
        self._feed()

    def _closed(self) -> RewardError:
        return RewardError(f"the processes of reward function '{self.name}' were closed; make another RewardRunner.")


def batch_of(samples: Sequence[Sample]) -> Sample:
    """Return all samples as one batch, whose seed is derived from theirs."""
    seeds = " ".join(str(seed) for seed, _ in samples).encode()
    seed = int.from_bytes(hashlib.blake2b(seeds, digest_size=7).digest(), "little")
    return seed, as_batch([arguments for _, arguments in samples])
