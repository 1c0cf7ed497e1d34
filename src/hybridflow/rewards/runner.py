"""Runs a user's reward function in processes of its own, which may hang, crash or be killed: the run goes on.

    samples ──pickle──> process ──> function ──> result ──JSON──> in the order of the samples

A process has the next sample before it has answered the last one, so that it never waits; one with an `async` function
has many at a time. One that does not answer in time is killed and replaced. The sample it was at has failed, that
behind it goes to another one; where it was at many, each of them is tried alone.
"""

import hashlib
import json
import selectors
import subprocess
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.rewards.batches import as_batch, split
from hybridflow.rewards.framed_process import FramedProcess
from hybridflow.rewards.outcome import Heard, Outcome, Outcomes
from hybridflow.rewards.reward_process import num_samples_of
from hybridflow.runtime import user_code

IN_FLIGHT = 2
"""Samples that a process has at a time: the one it is at, and the next."""

LOOK_AGAIN_S = 1.0
"""How often to look whether a process has ended without its connection being closed."""

GRACE_S = 5.0
"""What a process with an async function has beyond the time-out, which it keeps itself, before it is killed."""

START_TIMEOUT_S = 120.0
"""For starting a process and importing the function's module."""

Sample = tuple[int, Mapping[str, Any]]
"""A seed and the keyword arguments."""


class _Process(FramedProcess):
    """A process, the samples that it has, and when it is late."""

    def __init__(self, settings: str) -> None:
        super().__init__(settings)
        self.numbers: deque[int] = deque()  # of the samples, the one it is at first
        self.is_ready = False
        self.deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def is_at_work(self) -> bool:
        return bool(self.numbers) or not self.is_ready

    @property
    def is_late(self) -> bool:
        return self.is_at_work and time.monotonic() > self.deadline


class RewardRunner:
    """`num_processes` processes that run the function `name`; `close` ends them, as does the end of this process.

    It is called with the four arguments of each sample and `kwargs`; if it is `async`, with `concurrency` samples at a
    time in each process; if its arguments are data_sources, solution_strs, ground_truths and extra_infos, once with the
    lists of all samples, and returns a list. Raises RewardError if the function cannot be loaded there.
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
    ) -> None:
        self.name, self.kwargs, self._num_processes = name, dict(kwargs or {}), num_processes
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self.takes_batches, self._in_flight, self._grace_s = False, IN_FLIGHT, 0.0
        self.source = ""  # digest of the file that the function is in
        self._is_known = False  # whether a process has said what kind of function it is
        source, _, function = name.rpartition(":")
        if source.endswith(".py"):
            name = f"{Path(source).expanduser().resolve()}:{function}"
        settings = {"function": name, "loader": user_code.__file__, "memory_bytes": memory_bytes}
        self._settings = json.dumps({**settings, "timeout_s": timeout_s, "kwargs": self.kwargs})
        self._processes: list[_Process] = []
        self._suspects: set[int] = set()
        weakref.finalize(self, _kill_all, self._processes)

    def close(self) -> None:
        """Kill the processes."""
        _kill_all(self._processes)

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the outcome of each sample, in order."""
        self.start()
        if self.takes_batches and samples:
            return split(self.ask([batch_of(samples)])[0], len(samples))
        return self.ask(samples)

    def ask(self, samples: Sequence[Sample], heard: Heard | None = None) -> list[Outcome]:
        """Call the function on each sample, or on each `batch_of` samples; `heard` gets each outcome at once."""
        for process in [p for p in self._processes if p.popen.poll() is not None]:
            self._processes.remove(process)  # it was killed while it had nothing to do
            process.kill()
        waiting = deque(range(len(samples)))
        outcomes = Outcomes([None] * len(samples), heard)
        self._suspects.clear()
        try:
            while waiting or any(process.numbers for process in self._processes):
                self._start_missing(len(waiting))
                for process in self._processes:
                    self._feed(process, samples, waiting)
                self._communicate(outcomes, waiting)
        except BaseException:
            _kill_all(self._processes)  # what is under way would be taken for answers to the next call
            raise
        return [outcome for outcome in outcomes.known if outcome is not None]

    def start(self) -> None:
        """Start a process, which says what kind of function it is, unless that is known."""
        if self._is_known:
            return
        try:
            self._start_missing(1)
            while not any(process.is_ready for process in self._processes):
                self._communicate(Outcomes([]), deque())
        except BaseException:
            _kill_all(self._processes)
            raise

    def _communicate(self, outcomes: Outcomes, waiting: deque[int]) -> None:
        """Wait until a process can be written to, says something, or is late; and act on it."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.connection, process.events, process)
            events = selector.select(min(self._seconds_left(), LOOK_AGAIN_S))
        heard_of = {key.data for key, what in events if what & selectors.EVENT_READ}
        for key, _ in events:
            key.data.send()
        for process in heard_of:
            self._read(process, outcomes, waiting)
        for process in list(self._processes):
            has_ended = process not in heard_of and process.popen.poll() is not None  # though a child holds its line
            if process.is_late or has_ended:
                self._give_up(process, outcomes, waiting)

    def _start_missing(self, num_waiting: int) -> None:
        wanted = min(self._num_processes, len(self._processes) + num_waiting)
        while len(self._processes) < wanted:
            self._processes.append(_Process(self._settings))

    def _feed(self, process: _Process, samples: Sequence[Sample], waiting: deque[int]) -> None:
        if not process.is_ready:
            return
        while waiting and self._may_have(process, waiting[0]):
            number = waiting.popleft()
            seed, arguments = samples[number]
            if not process.numbers or self._grace_s:
                process.deadline = self._deadline(num_samples_of(arguments))
            process.numbers.append(number)
            process.put((number, seed, dict(arguments)))
        process.send()

    def _may_have(self, process: _Process, number: int) -> bool:
        """One of those among which a process was lost must be alone, or another one is lost for it."""
        if number in self._suspects or any(other in self._suspects for other in process.numbers):
            return not process.numbers
        return len(process.numbers) < self._in_flight

    def _read(self, process: _Process, outcomes: Outcomes, waiting: deque[int]) -> None:
        if not process.receive():
            self._give_up(process, outcomes, waiting)
            return
        for message in process.messages():
            if "not_loaded" in message:
                raise RewardConfigError(message["not_loaded"])
            if "ready" in message:
                process.is_ready = self._is_known = True
                self.takes_batches, self.source = message["takes_batches"], message["source"]
                if message["is_async"]:
                    self._in_flight, self._grace_s = self._concurrency, GRACE_S
                continue
            if message.get("number") not in process.numbers:  # of a child that the function has forked, for one
                self._give_up(process, outcomes, waiting, "let a process that it has forked answer as well")
                return
            process.numbers.remove(message["number"])
            process.deadline = self._deadline()
            outcomes.tell(message["number"], Outcome.of_message(message))

    def _give_up(self, process: _Process, outcomes: Outcomes, waiting: deque[int], problem: str = "") -> None:
        """Kill a process that is late, gone, or has another `problem`; the sample that it was at has failed."""
        is_late = not problem and process.is_late and process.popen.poll() is None
        self._processes.remove(process)
        if not (is_late or problem):
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(1.0)  # for the status that it ends with
        process.kill()
        if not process.is_ready:
            raise RewardError(
                f"a process for reward function '{self.name}' "
                + (f"did not start within {START_TIMEOUT_S:.0f} s." if is_late else f"ended at once: {process.end()}.")
            )
        if not process.numbers:
            return
        if self._grace_s and len(process.numbers) > 1:  # it was at all of them
            self._suspects.update(process.numbers)
        else:
            if is_late:
                problem = f"took longer than reward.timeout_s={self._timeout_s}"
            problem = problem or f"ended its process: {process.end()}"
            outcomes.tell(process.numbers.popleft(), Outcome(None, "timeout" if is_late else "died", problem))
        waiting.extendleft(reversed(process.numbers))

    def _deadline(self, num_samples: int = 1) -> float:
        if not self._timeout_s:
            return float("inf")
        return time.monotonic() + self._timeout_s * num_samples + self._grace_s

    def _seconds_left(self) -> float:
        busy = [process.deadline for process in self._processes if process.is_at_work]
        first = min(busy, default=float("inf"))
        return max(0.0, first - time.monotonic()) + 0.001


def batch_of(samples: Sequence[Sample]) -> Sample:
    """All samples as one; its seed is made of theirs."""
    seeds = " ".join(str(seed) for seed, _ in samples).encode()
    seed = int.from_bytes(hashlib.blake2b(seeds, digest_size=7).digest(), "little")
    return seed, as_batch([arguments for _, arguments in samples])


def _kill_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().kill()
