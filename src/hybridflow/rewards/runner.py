"""Runs a user's reward function in processes of its own, which may hang, crash or be killed: the run goes on.

    samples ──pickle──> process ──> function ──> result ──JSON──> in the order of the samples

A process has the next sample before it has answered the last one, so that it never waits; one with an `async` function
has many at a time. One that does not answer in time is killed and replaced. The sample it was at has failed, that
behind it goes to another one; where it was at many, each of them is tried alone.
"""

import hashlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.errors import RewardConfigError, RewardError
from hybridflow.rewards.batches import as_batch, split
from hybridflow.rewards.outcome import Heard, Outcome, Outcomes
from hybridflow.rewards.reward_process import LENGTH, num_samples_of
from hybridflow.runtime import user_code

LOADER = Path(user_code.__file__)
PROGRAM = Path(__file__).with_name("reward_process.py")
IN_FLIGHT = 2
"""Samples that a process has at a time: the one it is at, and the next."""

LOOK_AGAIN_S = 1.0
"""How often to look whether a process has ended without its pipe being closed."""

GRACE_S = 5.0
"""What a process with an async function has beyond the time-out, which it keeps itself, before it is killed."""

START_TIMEOUT_S = 120.0
"""For starting a process and importing the function's module."""

Sample = tuple[int, Mapping[str, Any]]
"""A seed and the keyword arguments."""


@dataclass(eq=False)
class _Process:
    popen: subprocess.Popen[bytes]
    numbers: deque[int] = field(default_factory=deque)  # of the samples that it has, the one it is at first
    to_send: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    is_ready: bool = False
    deadline: float = 0.0


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
        settings = {"function": name, "loader": str(LOADER), "memory_bytes": memory_bytes}
        self._settings = json.dumps({**settings, "timeout_s": timeout_s, "kwargs": self.kwargs})
        self._processes: list[_Process] = []
        self._suspects: set[int] = set()
        weakref.finalize(self, _kill_all, self._processes)

    def close(self) -> None:
        """Kill the processes."""
        _kill_all(self._processes)

    def run(self, samples: Sequence[Sample], heard: Heard | None = None) -> list[Outcome]:
        """The outcome of each sample, in order; `heard` is told of each as it comes, but for those of a batch."""
        if not self._is_known:
            self.start()
        if self.takes_batches and samples:
            return split(self.run_batch(samples), len(samples))
        return self._run(samples, heard)

    def run_batch(self, samples: Sequence[Sample]) -> Outcome:
        """What a function of batches says of all samples."""
        return self._run([_batch_of(samples)], None)[0]

    def _run(self, samples: Sequence[Sample], heard: Heard | None) -> list[Outcome]:
        for process in [p for p in self._processes if p.popen.poll() is not None]:
            self._processes.remove(process)  # killed by somebody while it had nothing to do
            _kill(process)
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
        """Have one process with the function loaded."""
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
                selector.register(_stdout(process), selectors.EVENT_READ, process)
                if process.to_send:
                    selector.register(_stdin(process), selectors.EVENT_WRITE, process)
            events = selector.select(min(self._seconds_left(), LOOK_AGAIN_S))
        for key, what in events:
            if what & selectors.EVENT_WRITE:
                _send(key.data)
        for key, what in events:
            if what & selectors.EVENT_READ:
                self._read(key.data, outcomes, waiting)
        heard_of = {key.data for key, what in events if what & selectors.EVENT_READ}
        for process in list(self._processes):
            has_ended = process not in heard_of and process.popen.poll() is not None  # though a child holds its pipe
            if self._is_late(process) or has_ended:
                self._give_up(process, outcomes, waiting)

    def _start_missing(self, num_waiting: int) -> None:
        wanted = min(self._num_processes, len(self._processes) + num_waiting)
        while len(self._processes) < wanted:
            process = _Process(
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), self._settings],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                    bufsize=0,
                )
            )
            process.deadline = time.monotonic() + START_TIMEOUT_S
            for pipe in (_stdin(process), _stdout(process)):
                os.set_blocking(pipe, False)  # a function that hangs reads nothing more
            self._processes.append(process)

    def _feed(self, process: _Process, samples: Sequence[Sample], waiting: deque[int]) -> None:
        if not process.is_ready:
            return
        while waiting and self._may_have(process, waiting[0]):
            number = waiting.popleft()
            seed, arguments = samples[number]
            if not process.numbers or self._grace_s:
                process.deadline = self._deadline(num_samples_of(arguments))
            process.numbers.append(number)
            contents = pickle.dumps((number, seed, dict(arguments)))
            process.to_send += LENGTH.pack(len(contents)) + contents
        _send(process)

    def _may_have(self, process: _Process, number: int) -> bool:
        """One of those among which a process was lost must be alone, or another one is lost for it."""
        if number in self._suspects or any(other in self._suspects for other in process.numbers):
            return not process.numbers
        return len(process.numbers) < self._in_flight

    def _read(self, process: _Process, outcomes: Outcomes, waiting: deque[int]) -> None:
        chunk = os.read(_stdout(process), 1 << 16)
        if not chunk:
            self._give_up(process, outcomes, waiting)
            return
        process.received += chunk
        while (message := _message(process.received)) is not None:
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
        is_late = not problem and self._is_late(process) and process.popen.poll() is None
        self._processes.remove(process)
        if not (is_late or problem):
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(1.0)  # for the status that it ends with
        _kill(process)
        status = process.popen.returncode
        if not process.is_ready:
            raise RewardError(
                f"a process for reward function '{self.name}' "
                + (f"did not start within {START_TIMEOUT_S:.0f} s." if is_late else f"ended at once: {_ended(status)}.")
            )
        if not process.numbers:
            return
        if self._grace_s and len(process.numbers) > 1:  # it was at all of them
            self._suspects.update(process.numbers)
        else:
            if is_late:
                problem = f"took longer than reward.timeout_s={self._timeout_s}"
            problem = problem or f"ended its process: {_ended(status)}"
            outcomes.tell(process.numbers.popleft(), Outcome(None, "timeout" if is_late else "died", problem))
        waiting.extendleft(reversed(process.numbers))

    def _deadline(self, num_samples: int = 1) -> float:
        if not self._timeout_s:
            return float("inf")
        return time.monotonic() + self._timeout_s * num_samples + self._grace_s

    def _is_late(self, process: _Process) -> bool:
        is_at_work = bool(process.numbers) or not process.is_ready
        return is_at_work and time.monotonic() > process.deadline

    def _seconds_left(self) -> float:
        busy = [p.deadline for p in self._processes if p.numbers or not p.is_ready]
        first = min(busy, default=float("inf"))
        return max(0.0, first - time.monotonic()) + 0.001


def _batch_of(samples: Sequence[Sample]) -> Sample:
    """All samples as one; its seed is made of theirs."""
    seeds = " ".join(str(seed) for seed, _ in samples).encode()
    seed = int.from_bytes(hashlib.blake2b(seeds, digest_size=7).digest(), "little")
    return seed, as_batch([arguments for _, arguments in samples])


def _message(received: bytearray) -> dict[str, Any] | None:
    """Take the first whole message out of what was received."""
    if len(received) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(received[: LENGTH.size])
    end = LENGTH.size + length
    if len(received) < end:
        return None
    message = json.loads(bytes(received[LENGTH.size : end]))
    del received[:end]
    return message


def _send(process: _Process) -> None:
    """As much as its pipe takes."""
    with suppress(BlockingIOError, BrokenPipeError):  # an end is read from the other pipe
        while process.to_send:
            del process.to_send[: os.write(_stdin(process), process.to_send)]


def _stdin(process: _Process) -> int:
    assert process.popen.stdin is not None
    return process.popen.stdin.fileno()


def _stdout(process: _Process) -> int:
    assert process.popen.stdout is not None
    return process.popen.stdout.fileno()


def _kill(process: _Process) -> None:
    """End the process and what it started, which is in its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.popen.pid, signal.SIGKILL)
    process.popen.kill()
    process.popen.wait()
    for stream in (process.popen.stdin, process.popen.stdout):
        assert stream is not None
        stream.close()


def _kill_all(processes: list[_Process]) -> None:
    while processes:
        _kill(processes.pop())


def _ended(status: int | None) -> str:
    if status is not None and status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
