"""Runs a user's reward function in processes of its own, which may hang, crash or be killed: the run goes on.

    samples ──pickle──> process ──> function ──> result ──JSON──> in the order of the samples

A process has the next sample before it has answered the last one, so that it never waits. One that does not answer in
time is killed and replaced; the sample it was at has failed, that behind it goes to another one.
"""

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
from typing import Any, Literal

from hybridflow.errors import RewardError
from hybridflow.rewards.reward_process import LENGTH
from hybridflow.runtime import user_code

LOADER = Path(user_code.__file__)
PROGRAM = Path(__file__).with_name("reward_process.py")
IN_FLIGHT = 2
"""Samples that a process has at a time: the one it is at, and the next."""

START_TIMEOUT_S = 120.0
"""For starting a process and importing the function's module."""

FailureKind = Literal["raised", "timeout", "memory", "died"]


@dataclass(frozen=True)
class Outcome:
    """What the function returned, or what kind of failure there was and its text."""

    result: Any = None
    kind: FailureKind | None = None
    problem: str = ""
    cause: BaseException | None = None
    """The exception itself, where it was raised in this process."""


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

    Raises RewardError if the function cannot be loaded there.
    """

    def __init__(self, name: str, *, num_processes: int, timeout_s: float | None, memory_bytes: int) -> None:
        self.name, self._num_processes = name, num_processes
        self._timeout_s = timeout_s
        source, _, function = name.rpartition(":")
        if source.endswith(".py"):
            name = f"{Path(source).expanduser().resolve()}:{function}"
        self._settings = json.dumps({"function": name, "loader": str(LOADER), "memory_bytes": memory_bytes})
        self._processes: list[_Process] = []
        weakref.finalize(self, _kill_all, self._processes)

    def close(self) -> None:
        """Kill the processes."""
        _kill_all(self._processes)

    def run(self, samples: Sequence[tuple[int, Mapping[str, Any]]]) -> list[Outcome]:
        """The outcome of each sample (seed, keyword arguments), in order."""
        for process in [p for p in self._processes if p.popen.poll() is not None]:
            self._processes.remove(process)  # killed by somebody while it had nothing to do
            _kill(process)
        waiting = deque(range(len(samples)))
        outcomes: list[Outcome | None] = [None] * len(samples)
        try:
            while waiting or any(process.numbers for process in self._processes):
                self._start_missing(len(waiting))
                for process in self._processes:
                    self._feed(process, samples, waiting)
                self._communicate(outcomes, waiting)
        except BaseException:
            _kill_all(self._processes)  # what is under way would be taken for answers to the next call
            raise
        return [outcome for outcome in outcomes if outcome is not None]

    def start(self) -> None:
        """Have one process with the function loaded."""
        try:
            self._start_missing(1)
            while not any(process.is_ready for process in self._processes):
                self._communicate([], deque())
        except BaseException:
            _kill_all(self._processes)
            raise

    def _communicate(self, outcomes: list[Outcome | None], waiting: deque[int]) -> None:
        """Wait until a process can be written to, says something, or is late; and act on it."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(_stdout(process), selectors.EVENT_READ, process)
                if process.to_send:
                    selector.register(_stdin(process), selectors.EVENT_WRITE, process)
            events = selector.select(self._seconds_left())
        for key, what in events:
            if what & selectors.EVENT_WRITE:
                _send(key.data)
        for key, what in events:
            if what & selectors.EVENT_READ:
                self._read(key.data, outcomes, waiting)
        for process in [p for p in self._processes if self._is_late(p)]:
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

    def _feed(self, process: _Process, samples: Sequence[tuple[int, Mapping[str, Any]]], waiting: deque[int]) -> None:
        if not process.is_ready:
            return
        if not process.numbers:
            process.deadline = self._deadline()
        while waiting and len(process.numbers) < IN_FLIGHT:
            number = waiting.popleft()
            process.numbers.append(number)
            seed, arguments = samples[number]
            contents = pickle.dumps((seed, dict(arguments)))
            process.to_send += LENGTH.pack(len(contents)) + contents
        _send(process)

    def _read(self, process: _Process, outcomes: list[Outcome | None], waiting: deque[int]) -> None:
        chunk = os.read(_stdout(process), 1 << 16)
        if not chunk:
            self._give_up(process, outcomes, waiting)
            return
        process.received += chunk
        while (message := _message(process.received)) is not None:
            if "not_loaded" in message:
                raise RewardError(message["not_loaded"])
            if "ready" in message:
                process.is_ready = True
                continue
            number = process.numbers.popleft()
            outcomes[number] = Outcome(_result(message), message.get("kind"), message.get("error", ""))
            process.deadline = self._deadline()

    def _give_up(self, process: _Process, outcomes: list[Outcome | None], waiting: deque[int]) -> None:
        """Kill a process that is late, or gone; the sample that it was at has failed."""
        is_late = self._is_late(process) and process.popen.poll() is None
        self._processes.remove(process)
        if not is_late:
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
        number = process.numbers.popleft()
        if is_late:
            outcomes[number] = Outcome(None, "timeout", f"took longer than reward.timeout_s={self._timeout_s}")
        else:
            outcomes[number] = Outcome(None, "died", f"ended its process: {_ended(status)}")
        waiting.extendleft(reversed(process.numbers))

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s if self._timeout_s else float("inf")

    def _is_late(self, process: _Process) -> bool:
        is_at_work = bool(process.numbers) or not process.is_ready
        return is_at_work and time.monotonic() > process.deadline

    def _seconds_left(self) -> float | None:
        busy = [p.deadline for p in self._processes if p.numbers or not p.is_ready]
        first = min(busy, default=float("inf"))
        return None if first == float("inf") else max(0.0, first - time.monotonic()) + 0.001


class _Shown:
    """What a function returned that is neither a number nor a text: how it looks is all that came."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _result(message: Mapping[str, Any]) -> Any:
    def value(plain: Any) -> Any:
        return _Shown(plain["shown"]) if isinstance(plain, Mapping) else plain

    if "mapping" in message:
        return {name: value(plain) for name, plain in message["mapping"].items()}
    return value(message.get("result"))


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
