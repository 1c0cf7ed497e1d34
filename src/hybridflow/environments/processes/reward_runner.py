"""Runs a user's reward function in separate processes: the run continues if one hangs, crashes or is killed.

    samples ──pickle──> process ──> function ──> result ──JSON──> in the order of the samples

A process gets its next sample before it has answered the current one, so that it is never idle; a process with an
`async` function gets many at a time. A process that does not answer in time is killed and replaced. Its current sample
has failed and its next one goes to another process. If it was working on many samples, each of them is retried alone.
What a process did that has ended, its sample or its start, is retried, since it may have been killed from outside.

Samples may be submitted in one thread while another waits for those of earlier calls: the processes work on both.
"""

import hashlib
import json
import selectors
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.environments.processes.arguments import as_batch
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.processes.framed_process import FramedProcess, WrongReplyError
from hybridflow.environments.processes.reward_process import num_samples_of
from hybridflow.environments.rewards.outcome import OnOutcome, Outcome, Outcomes, split
from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.runtime import user_code

IN_FLIGHT = 2
"""Samples that a process has at a time: the current one and the next."""

POLL_S = 1.0
"""Interval, in seconds, of checking for processes that exited without closing their connection."""

GRACE_S = 5.0
"""Seconds beyond the timeout before a process with an async function, which applies the timeout itself, is killed."""

MOST_FAILED_STARTS = 2
"""Number of processes in a row that may end while they start, and all of them at least once if the file was imported
before; the next such end is an error of the function's file."""

START_TIMEOUT_S = 120.0
"""Seconds for starting a process and importing the function's file, or `timeout_s` if that is longer."""

Sample = tuple[int, Mapping[str, Any]]
"""A seed and the keyword arguments."""


@dataclass(frozen=True)
class Submitted:
    """Samples that were submitted together, and their outcomes; the runner counts samples, from `first`."""

    first: int
    samples: Sequence[Sample]
    outcomes: Outcomes


class _Process(FramedProcess):
    """A process, the samples that it has, and its deadline."""

    def __init__(self, settings: str, start_timeout_s: float, closure: Closure | None) -> None:
        super().__init__(settings)
        if closure:
            self.put((closure.contents, closure.paths))
        self.numbers: deque[int] = deque()  # of its samples, the current one first
        self.is_ready = False
        self.last_number: int | None = None  # that it has answered, as sent
        self.has_repeated = False  # whether it has answered that sample again
        self.deadline = time.monotonic() + start_timeout_s

    @property
    def is_at_work(self) -> bool:
        return bool(self.numbers) or not self.is_ready

    @property
    def is_late(self) -> bool:
        return self.is_at_work and time.monotonic() > self.deadline


class RewardRunner:
    """Pool of `num_processes` processes that run the function `name`, until `close` or the end of this process.

    The function is called with the four arguments of each sample and `kwargs`. An `async` function works on
    `concurrency` samples at a time in each process. A function with the arguments data_sources, solution_strs,
    ground_truths and extra_infos is called once with the lists of all samples and returns a list. `closure`: the
    function itself, if a Python program holds it. Raises RewardError if the processes cannot load the function.
    """

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
        self._closure = closure
        self.name, self.kwargs, self._num_processes = name, dict(kwargs or {}), num_processes
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self.takes_batches, self.takes_names, self._in_flight, self._grace_s = False, False, IN_FLIGHT, 0.0
        self.source = ""  # digest of the file that defines the function
        self._num_submitted = 0  # samples, whose numbers are never used again
        self._submitted: dict[int, Submitted] = {}  # by the number of each sample, until `wait` returns
        self._waiting: deque[int] = deque()  # samples that no process has
        self._turn = threading.Lock()  # to use the processes
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._is_known = False  # whether a process has reported the kind of the function
        self._failed_starts = 0  # processes that have ended before they were ready, since one was
        source, _, function = name.rpartition(":")
        if source.endswith(".py"):
            name = f"{Path(source).expanduser().resolve()}:{function}"
        settings = {"function": name, "is_closure": bool(closure), "loader": user_code.__file__}
        limits = {"memory_bytes": memory_bytes, "timeout_s": timeout_s}
        self._settings = json.dumps({**settings, **limits, "kwargs": self.kwargs})
        self._processes: list[_Process] = []
        self._suspects: set[int] = set()
        weakref.finalize(self, _end, self._processes, (self._woken, self._waker))

    def close(self) -> None:
        """Kill the processes."""
        _kill_all(self._processes)

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcome of each sample, in order."""
        self.start()
        if self.takes_batches and samples:
            return split(self.call([batch_of(samples)])[0], len(samples))
        return self.call(samples)

    def call(self, samples: Sequence[Sample], on_outcome: OnOutcome | None = None) -> list[Outcome]:
        """Call the function on each sample, or on each `batch_of` samples; `on_outcome` gets each outcome at once."""
        return self.wait(self.submit(samples, on_outcome))

    def submit(self, samples: Sequence[Sample], on_outcome: OnOutcome | None = None) -> Submitted:
        """Submit samples for `wait`; the processes begin with them during any call of `wait`."""
        submitted = Submitted(self._num_submitted, samples, Outcomes([None] * len(samples), on_outcome))
        numbers = range(submitted.first, submitted.first + len(samples))
        self._num_submitted += len(samples)
        self._submitted.update(dict.fromkeys(numbers, submitted))
        self._waiting.extend(numbers)
        with suppress(BlockingIOError):  # it is woken already
            self._waker.send(b" ")
        return submitted

    def wait(self, submitted: Submitted) -> list[Outcome]:
        """Return the outcome of each submitted sample, in order; an error leaves what others have submitted."""
        with self._turn:
            try:
                self._remove_killed()
                while submitted.outcomes.num_missing:
                    self._start_missing()
                    for process in self._processes:
                        self._feed(process)
                    self._communicate()
            except BaseException:
                self._withdraw(submitted)
                raise
            finally:
                for number in range(submitted.first, submitted.first + len(submitted.samples)):
                    del self._submitted[number]
        return [outcome for outcome in submitted.outcomes.known if outcome is not None]

    def start(self) -> None:
        """Start a process to learn the kind of the function, unless it is known."""
        if self._is_known:
            return
        with self._turn:
            try:
                while not any(process.is_ready for process in self._processes):
                    if not self._processes:
                        self._processes.append(_Process(self._settings, self._start_timeout_s, self._closure))
                    self._communicate()
            except BaseException:
                _kill_all(self._processes)
                raise

    def _remove_killed(self) -> None:
        """Remove processes that were killed while they were idle."""
        for process in [p for p in self._processes if not p.numbers and p.popen.poll() is not None]:
            self._processes.remove(process)
            process.kill()

    def _withdraw(self, submitted: Submitted) -> None:
        """Kill the processes; samples that were submitted with others wait for new ones."""
        numbers = [number for process in self._processes for number in process.numbers]
        _kill_all(self._processes)  # pending answers would be taken for answers to the next call
        while self._waiting:
            numbers.append(self._waiting.popleft())
        others = [number for number in sorted(numbers) if self._submitted[number] is not submitted]
        self._suspects.intersection_update(others)
        self._waiting.extendleft(reversed(others))

    def _communicate(self) -> None:
        """Wait until a process can be written to, has answered or is late, and handle it; or until samples come."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for process in self._processes:
                selector.register(process.connection, process.events, process)
            events = [(key.data, what) for key, what in selector.select(min(self._seconds_left(), POLL_S))]
        with suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        readable = {process for process, what in events if process and what & selectors.EVENT_READ}
        for process, _ in events:
            if process:
                process.send()
        for process in readable:
            self._read(process)
        for process in list(self._processes):
            has_exited = (
                process not in readable and process.popen.poll() is not None
            )  # a child may keep its connection open
            if process.is_late or has_exited:
                self._give_up(process)

    def _start_missing(self) -> None:
        wanted = min(self._num_processes, len(self._processes) + len(self._waiting))
        while len(self._processes) < wanted:
            self._processes.append(_Process(self._settings, self._start_timeout_s, self._closure))

    def _feed(self, process: _Process) -> None:
        if not process.is_ready:
            return
        while self._waiting and self._may_have(process, self._waiting[0]):
            number = self._waiting.popleft()
            submitted = self._submitted[number]
            seed, arguments = submitted.samples[number - submitted.first]
            if not process.numbers or self._grace_s:
                process.deadline = self._deadline(num_samples_of(arguments))
            process.numbers.append(number)
            process.put((number, seed, dict(arguments)))
        process.send()

    def _may_have(self, process: _Process, number: int) -> bool:
        """Return whether the process may get this sample; suspects of a lost process are tried alone."""
        if number in self._suspects or any(other in self._suspects for other in process.numbers):
            return not process.numbers
        return len(process.numbers) < self._in_flight

    def _read(self, process: _Process) -> None:
        if not process.receive():
            self._give_up(process)
            return
        try:
            for message in process.messages():
                self._handle(message, process)
        except WrongReplyError as error:
            self._give_up(process, str(error))

    def _handle(self, message: Mapping[str, Any], process: _Process) -> None:
        """Record the outcome in a message; raise WrongReplyError for one that is not expected now."""
        if not process.is_ready:
            if isinstance(message.get("not_loaded"), str):
                raise RewardConfigError(message["not_loaded"])
            self._set_kind(message)
            process.is_ready = self._is_known = True
            self._failed_starts = 0
            return
        number = message.get("number")
        if type(number) is not int:
            raise WrongReplyError(f"sent {shorten(message)}, which is not a reply to a sample")
        process.has_repeated = number == process.last_number
        # The samples of a function that is not async are answered in order.
        if number not in (process.numbers if self._grace_s else list(process.numbers)[:1]):
            raise WrongReplyError(f"sent a reply that is not expected, {shorten(message)}")
        try:
            outcome = Outcome.of_message(message)
        except (ValueError, RecursionError) as error:
            raise WrongReplyError(f"sent {shorten(message)}, which is not a reply: {error}") from None
        process.numbers.remove(number)
        process.last_number = number
        process.deadline = self._deadline()
        self._record(number, outcome)

    def _record(self, number: int, outcome: Outcome) -> None:
        """Store the outcome of a sample, unless it was returned already."""
        self._suspects.discard(number)
        if submitted := self._submitted.get(number):
            submitted.outcomes.record(number - submitted.first, outcome)

    def _set_kind(self, message: Mapping[str, Any]) -> None:
        """Keep the kind of the function, of which each process informs the run when it is ready."""
        kinds = {"ready": bool, "is_async": bool, "takes_batches": bool, "takes_names": bool, "source": str}
        if any(type(message.get(name)) is not kind for name, kind in kinds.items()):
            raise WrongReplyError(f"sent {shorten(message)} while it was imported")
        self.takes_batches, self.takes_names = message["takes_batches"], message["takes_names"]
        self.source = message["source"]
        if message["is_async"]:
            self._in_flight, self._grace_s = self._concurrency, GRACE_S

    def _give_up(self, process: _Process, problem: str = "") -> None:
        """Kill a process that is late, has exited, or has another `problem`; its current sample has failed.

        If the process has answered a sample twice, that sample has failed instead.
        """
        is_late = not problem and process.is_late and process.popen.poll() is None
        self._processes.remove(process)
        if not (is_late or problem):
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(1.0)  # for its exit status
        process.kill()
        most = max(MOST_FAILED_STARTS, self._num_processes if self._is_known else 0)
        if not (process.is_ready or is_late or problem) and self._failed_starts < most:
            self._failed_starts += 1
            return
        if not process.is_ready or (problem and process.last_number is None and not process.numbers):
            late = (
                f"took longer than {self._start_timeout_s:.0f} s, the limit for starting a reward process; move slow "
                "work from the import of the file into the function"
            )
            raise RewardError(
                f"the import of reward function '{self.name}' "
                + (late if is_late else problem or f"ended its process: {process.end()}")
                + "."
            )
        if process.has_repeated and process.last_number is not None:
            self._record(process.last_number, Outcome(None, "died", problem))
        elif not process.numbers:
            return
        elif self._grace_s and len(process.numbers) > 1:  # it was working on all of them
            self._suspects.update(process.numbers)
        elif not (is_late or problem) and process.numbers[0] not in self._suspects:
            self._suspects.add(process.numbers[0])
        else:
            if is_late:
                problem = f"took longer than reward.timeout_s={self._timeout_s}"
            problem = problem or f"ended its process: {process.end()}"
            self._record(process.numbers.popleft(), Outcome(None, "timeout" if is_late else "died", problem))
        self._waiting.extendleft(reversed(process.numbers))

    def _deadline(self, num_samples: int = 1) -> float:
        if not self._timeout_s:
            return float("inf")
        return time.monotonic() + self._timeout_s * num_samples + self._grace_s

    @property
    def _start_timeout_s(self) -> float:
        return max(START_TIMEOUT_S, self._timeout_s or 0.0)

    def _seconds_left(self) -> float:
        busy = [process.deadline for process in self._processes if process.is_at_work]
        first = min(busy, default=float("inf"))
        return max(0.0, first - time.monotonic()) + 0.001


def shorten(message: Mapping[str, Any]) -> str:
    """Return the start of a message's text, for an error."""
    try:
        text = repr(message)
    except RecursionError:
        return "a message that is nested too deeply"
    return text if len(text) <= 200 else f"{text[:200]}..."


def batch_of(samples: Sequence[Sample]) -> Sample:
    """Return all samples as one batch, whose seed is derived from theirs."""
    seeds = " ".join(str(seed) for seed, _ in samples).encode()
    seed = int.from_bytes(hashlib.blake2b(seeds, digest_size=7).digest(), "little")
    return seed, as_batch([arguments for _, arguments in samples])


def _end(processes: list[_Process], sockets: Sequence[socket.socket]) -> None:
    _kill_all(processes)
    for each in sockets:
        each.close()


def _kill_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().kill()
