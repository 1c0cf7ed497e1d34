"""What a process on this node is doing, as far as it can be seen from outside, and what could not be seen.

Knows `Pulse`, which the process runs, and /proc; nothing of workers. Takes a second or so and never waits longer than
it was told, whatever state the process is in.
"""

import fcntl
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Literal

from hybridflow.runtime.pulse import (
    RECORD_NAME,
    STACK_SIGNAL,
    STACKS_NAME,
    PulseAddress,
    PulseRecord,
    decode_record,
)

State = Literal["running", "blocked", "stopped", "zombie", "dead", "unknown"]

_STATES: dict[str, State] = {"R": "running", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "dead", "x": "dead"}
_CPU_SAMPLE_S = 0.2
_MAX_LOOKS = 11
_POLL_S = 0.01
_MIN_UNANSWERED_S = 1.0
_QUIET_S = 0.1
"""faulthandler writes frame by frame without a mark at the end: text that has not grown for this long is whole."""
_MAX_STACK_BYTES = 2**20
_MAX_LOG_BYTES = 2**15
_STACKS_TITLE = "Its Python stacks, most recent call first (the current thread is the one that wrote them)"
_FILE_IS_GONE = "its memory file is gone: it ended, stopped its Pulse or became another program."


@dataclass(frozen=True)
class Call:
    """A call and for how long the process has been in it, or how long ago it ended."""

    what: str
    seconds: float


@dataclass(frozen=True)
class ProcessReport:
    """What `report_process` saw; `str()` is the text for an error message."""

    pid: int
    hostname: str
    state: State
    """Of the main thread. "unknown" where this process cannot see it: another node, or no /proc."""
    heartbeat_age_s: float | None = None
    call: Call | None = None
    last_call: Call | None = None
    """The one that ended last, where the process is in none."""
    cpu_share: float | None = None
    """Of one core, over all threads: 2.0 is two busy threads."""
    kernel_wait: str = ""
    """The kernel function in which the main thread sleeps."""
    findings: list[str] = field(default_factory=list)
    """What follows from the rest, in sentences."""
    stacks: str = ""
    """The Python stacks of all threads as faulthandler writes them, most recent call first."""
    unseen: list[str] = field(default_factory=list)
    """What could not be seen and why, in sentences."""
    log_tail: dict[str, str] = field(default_factory=dict)
    """The last lines of each log file."""

    def __str__(self) -> str:
        head = f"Process {self.pid} on {self.hostname} is {self.state}"
        if self.call is not None:
            head += f", for {self.call.seconds:.1f} s in {self.call.what}"
        elif self.last_call is not None:
            head += f", in no call; {self.last_call.what} ended {self.last_call.seconds:.1f} s ago"
        figures = []
        if self.heartbeat_age_s is not None:
            figures.append(f"its heartbeat is {self.heartbeat_age_s:.1f} s old")
        if self.cpu_share is not None:
            figures.append(f"it uses {self.cpu_share:.0%} of a core")
        if self.kernel_wait:
            figures.append(f"its main thread waits in the kernel's {self.kernel_wait}")
        lines = [f"{head}; {', '.join(figures)}." if figures else f"{head}."]
        lines += self.findings
        if self.stacks:
            lines += [f"{_STACKS_TITLE}:", indent(self.stacks.strip("\n"), "  ")]
        for path, text in self.log_tail.items():
            lines += [f"The end of {path}:", indent(text, "  ")]
        if self.unseen:
            lines += ["Not seen:", *(f"  - {sentence}" for sentence in self.unseen)]
        return "\n".join(lines)


def report_process(address: PulseAddress, *, timeout_s: float = 3.0, log_lines: int = 20) -> ProcessReport:
    """Look at a process of this node that runs a `Pulse`; waits at most `timeout_s` for its stacks.

    While the process gives its interpreter lock away now and then, it writes its stacks itself, unharmed. If it has not
    for `timeout_s` / 2 and at least 1 s, or its heartbeat is old, a signal asks for them: only this very process, and
    only while it has the handler. Python goes on after it as if nothing had been; C code does, unless it takes an
    interrupted system call for a failure. For another observer of the same process it waits `timeout_s` more.
    """
    unseen: list[str] = []
    log_tail = _read_log_tails(address.log_paths, log_lines, unseen)
    elsewhere = _why_not_here(address)
    if elsewhere:
        unseen.append(elsewhere)
        state = "dead" if address.hostname == socket.gethostname() and not _has_process(address.pid) else "unknown"
        return ProcessReport(address.pid, address.hostname, state, unseen=unseen, log_tail=log_tail)

    state, cpu_share = _sample(address)
    look = _Look(is_starved=_is_starved(state, cpu_share))
    stacks, kernel_wait, handler_is_gone = "", "", False
    if state not in ("dead", "zombie"):
        kernel_wait = _read_kernel_wait(address.pid)
        try:
            look.read(address)
        except _UnseenError as error:
            unseen.append(f"Its heartbeat and its call: {error}")
        try:
            if state == "stopped":
                raise _UnseenError("it is stopped and can give none before it is continued (kill -CONT).")
            stacks = _take_stacks(address, look, timeout_s, unseen)
            unseen.append(
                f"Frames below Python (C, C++, CUDA); `py-spy dump --native --pid {address.pid}` or gdb may show them."
            )
        except _UnseenError as error:
            handler_is_gone = isinstance(error, _NoHandlerError)
            unseen.append(f"Its stacks: {error}")
        later = _read_stat(address)
        if later is None or later.state in ("dead", "zombie", "stopped"):
            state = "dead" if later is None else later.state
    record, now = look.record, look.read_at
    if record is None and state in ("dead", "zombie"):
        unseen.append("What it was doing: its record and its stacks were in its memory and ended with it.")
    heartbeat_age_s = None if record is None else max(0.0, now - record.heartbeat_at)
    present = record is not None and record.is_present
    call = None if record is None or not record.what else Call(record.what, max(0.0, now - record.since))
    return ProcessReport(
        pid=address.pid,
        hostname=address.hostname,
        state=state,
        heartbeat_age_s=heartbeat_age_s,
        call=call if present else None,
        last_call=None if present else call,
        cpu_share=cpu_share,
        kernel_wait=kernel_wait,
        findings=_find(address, state, cpu_share, look, handler_is_gone),
        stacks=stacks,
        unseen=unseen,
        log_tail=log_tail,
    )


def own_stacks() -> str:
    """The Python stacks of all threads of this process, most recent call last, the calling thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != own)
    parts = []
    for ident, frame in frames:
        stack = traceback.format_stack(frame.f_back if ident == own else frame)  # without this function
        title = (
            f"Thread {names.get(ident, hex(ident))}{', which asks' if ident == own else ''} (most recent call last):"
        )
        parts.append("".join([f"{title}\n", *stack]))
    return "\n".join(parts)


class _UnseenError(Exception):
    """Something cannot be seen; the text says why."""


class _NoHandlerError(_UnseenError):
    """The process does not, or no longer, catch the signal."""


@dataclass
class _Look:
    """The record as last read, and when."""

    is_starved: bool
    is_silent: bool = False
    """Whether it had time to write its stacks and did not."""
    record: PulseRecord | None = None
    read_at: float = 0.0

    def read(self, address: PulseAddress) -> PulseRecord:
        self.record, self.read_at = _read_record(address), time.monotonic()
        return self.record

    @property
    def is_stale(self) -> bool:
        """Whether the heartbeat was overdue."""
        return self.record is not None and self.read_at - self.record.heartbeat_at > 3 * self.record.interval_s + 0.5


@dataclass(frozen=True)
class _Stat:
    state: State
    cpu_ticks: int
    exit_status: int


def _read_stat(address: PulseAddress) -> _Stat | None:
    """What the kernel says of the very process; None if it is gone, even if another one has its pid."""
    fields = _read_stat_fields(address.pid)
    if fields is None or int(fields[19]) != address.start_ticks:
        return None
    state = _STATES.get(fields[0], "blocked")  # S and I sleep, D sleeps deaf to signals
    return _Stat(state=state, cpu_ticks=int(fields[11]) + int(fields[12]), exit_status=int(fields[49]))


def _read_stat_fields(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from the third field on, the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _why_not_here(address: PulseAddress) -> str:
    """Why this process cannot look at that one; "" if it can."""
    if socket.gethostname() != address.hostname:
        return f"It runs on {address.hostname}, this is {socket.gethostname()}: only a process on its node sees it."
    if address.start_ticks is None:
        return f"Anything of it: {address.nothing_because}"
    if os.readlink("/proc/self/ns/pid") != address.pid_namespace:
        return "It runs in another container (pid namespace) of this node: only a process in there sees it."
    return ""


def _has_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _sample(address: PulseAddress) -> tuple[State, float | None]:
    """The state at most of three looks or more, and the share of a core used between the first and the last.

    A process that seems to get no processor is looked at for longer: its turn may come.
    """
    start, looks, state, cpu_share = time.monotonic(), [], "blocked", 0.0
    while len(looks) < 3 or (_is_starved(state, cpu_share) and len(looks) < _MAX_LOOKS):
        if looks:
            time.sleep(_CPU_SAMPLE_S / 2)
        stat = _read_stat(address)
        if stat is None or stat.state in ("zombie", "dead"):
            return "dead" if stat is None else stat.state, None
        looks.append(stat)
        seconds = (stat.cpu_ticks - looks[0].cpu_ticks) / os.sysconf("SC_CLK_TCK")
        cpu_share = seconds / max(time.monotonic() - start, 1e-9)
        is_running = sum(look.state == "running" for look in looks) > len(looks) / 2
        state = "stopped" if stat.state == "stopped" else "running" if is_running else "blocked"
    return state, cpu_share


def _is_starved(state: State, cpu_share: float | None) -> bool:
    """Whether the process is ready to run but gets hardly any processor."""
    return state == "running" and cpu_share is not None and cpu_share < 0.1


def _read_kernel_wait(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


@contextmanager
def _memory_file(address: PulseAddress, fd: int, name: str, flags: int) -> Iterator[int]:
    """A descriptor of its own for the memory file that the process has as `fd`."""
    try:
        own_fd = os.open(f"/proc/{address.pid}/fd/{fd}", flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError as error:
        raise _UnseenError(_FILE_IS_GONE) from error
    except OSError as error:
        raise _UnseenError(f"its memory file cannot be opened ({error.strerror}).") from error
    try:
        # After exec or Pulse.stop() the number may mean any other file, which must not be truncated.
        if os.readlink(f"/proc/self/fd/{own_fd}") != f"/memfd:{name} (deleted)":
            raise _UnseenError(_FILE_IS_GONE)
        yield own_fd
    finally:
        os.close(own_fd)


def _read_record(address: PulseAddress) -> PulseRecord:
    if address.record_fd is None:
        raise _UnseenError(address.nothing_because)
    with _memory_file(address, address.record_fd, RECORD_NAME, os.O_RDONLY) as fd:
        for _ in range(100):
            record = decode_record(os.pread(fd, 2**16, 0))
            if record is not None:
                return record
    raise _UnseenError("its record was never whole in 100 looks.")


def _take_stacks(address: PulseAddress, look: _Look, timeout_s: float, unseen: list[str]) -> str:
    """Have the process write its stacks, and read them; the file is empty before and after."""
    if address.stack_fd is None:
        raise _UnseenError(address.nothing_because)
    with _memory_file(address, address.stack_fd, STACKS_NAME, os.O_RDWR) as fd:
        _lock(fd, timeout_s)
        look.read(address)
        os.ftruncate(fd, 0)
        is_whole = False
        if not look.is_stale:
            _ask(address)
            is_whole = _wait_for_text(fd, address, timeout_s / 2)
        if os.fstat(fd).st_size == 0:
            look.is_silent = look.is_stale or timeout_s / 2 >= _MIN_UNANSWERED_S
            _signal(address, look, timeout_s)
            is_whole = _wait_for_text(fd, address, timeout_s / 2)
        data = os.pread(fd, _MAX_STACK_BYTES, 0)
        is_cut = os.fstat(fd).st_size > len(data)
        os.ftruncate(fd, 0)
    if not data:
        raise _UnseenError(_why_no_text(address, timeout_s))
    if is_cut or not is_whole:
        unseen.append("The end of its stacks: they were too long, or not yet written to the end.")
    text = data.decode("utf-8", "replace")
    if "\n  ...\n" in text or "\n...\n" in text:
        unseen.append("Some frames or threads: faulthandler writes at most 100 of each.")
    return text


def _ask(address: PulseAddress) -> None:
    """Ask the thread of the heartbeat for the stacks. Opening the reading end of a pipe for writing gives the other."""
    try:
        fd = os.open(f"/proc/{address.pid}/fd/{address.request_fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _UnseenError(_FILE_IS_GONE) from error
    try:
        os.write(fd, b"\n")
    except BlockingIOError:
        pass  # full of requests
    except OSError as error:
        raise _UnseenError(_FILE_IS_GONE) from error
    finally:
        os.close(fd)


def _signal(address: PulseAddress, look: _Look, timeout_s: float) -> None:
    """Ask the process's signal handler for the stacks, since its Python does not answer."""
    try:
        pidfd = os.pidfd_open(address.pid)
    except (OSError, AttributeError) as error:
        raise _UnseenError(f"its Python did not answer, and pidfd_open failed ({error}).") from error
    try:
        # In this order: the pidfd is of whoever has the pid now, and its start time tells whether that is the one.
        stat = _read_stat(address)
        if stat is None or stat.state in ("dead", "zombie", "stopped"):
            raise _UnseenError(_why_no_text(address, timeout_s))
        record = look.read(address)  # once more, before the signal shakes something loose
        if not _has_signal(address.pid, "SigCgt"):
            raise _NoHandlerError("its Python did not answer, and SIGUSR1 would end it: the signal was not sent.")
        if not record.owns_signal:
            raise _UnseenError("its Python did not answer, and SIGUSR1 has another handler in it: it was not sent.")
        if look.is_starved or not look.is_silent:
            # Were it running Python, the handler could crash it.
            why = "it gets hardly any processor" if look.is_starved else f"only {timeout_s / 2:g} s were waited"
            raise _UnseenError(f"its Python did not answer, but {why}; the signal was not sent.")
        signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
    except OSError as error:
        raise _UnseenError(f"it could not be signalled ({error.strerror}).") from error
    finally:
        os.close(pidfd)


def _lock(fd: int, timeout_s: float) -> None:
    """Until `fd` is closed no other observer uses the file."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _UnseenError(f"another observer was taking them for all of {timeout_s:g} s.") from None
        time.sleep(_POLL_S)


def _wait_for_text(fd: int, address: PulseAddress, timeout_s: float) -> bool:
    """Whether the text came and stopped growing in time; a process that ends keeps nobody waiting."""
    size, changed = 0, time.monotonic()
    deadline = changed + timeout_s
    while time.monotonic() < deadline:
        now, new_size = time.monotonic(), os.fstat(fd).st_size
        if new_size != size:
            size, changed = new_size, now
        elif size and now - changed >= _QUIET_S:
            return True
        stat = _read_stat(address)
        if stat is None or stat.state in ("dead", "zombie"):
            return False
        time.sleep(_POLL_S)
    return False


def _why_no_text(address: PulseAddress, timeout_s: float) -> str:
    stat = _read_stat(address)
    if stat is None or stat.state in ("dead", "zombie"):
        return "it has just ended."
    if stat.state == "stopped":
        return "it is stopped and can give none before it is continued (kill -CONT)."
    fields = _read_stat_fields(address.pid)
    if fields and fields[0] == "D":
        return (
            f"none came in {timeout_s:g} s: it is in a system call that no signal interrupts (state D: disk, driver)."
        )
    if _has_signal(address.pid, "ShdPnd"):
        return f"none came in {timeout_s:g} s: the signal is pending, all its threads block it or get no processor."
    return f"none came in {timeout_s:g} s, although it took the signal."


def _has_signal(pid: int, mask: str) -> bool:
    """Whether the signal that asks for the stacks is in a mask of /proc/<pid>/status."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    values = [line.partition(":")[2] for line in lines if line.startswith(f"{mask}:")]
    return any(int(value, 16) >> (STACK_SIGNAL - 1) & 1 for value in values)


def _find(
    address: PulseAddress,
    state: State,
    cpu_share: float | None,
    look: _Look,
    handler_is_gone: bool,
) -> list[str]:
    if state == "dead":
        if _read_stat_fields(address.pid) is None:
            return ["It has ended."]
        return [f"It has ended; pid {address.pid} now belongs to another process, which was left alone."]
    if state == "zombie":
        stat = _read_stat(address)
        return ["It has ended." if stat is None else f"It has ended {_ending(stat)}; its parent has not noticed yet."]
    if state == "stopped":
        return ["It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."]
    if look.record is None or not (look.is_silent or look.is_stale):
        return []
    stale = f"Its heartbeat is {look.read_at - look.record.heartbeat_at:.1f} s old"
    if handler_is_gone:
        return [f"{stale} and its signal handler is gone: its interpreter is shutting down."]
    if look.is_starved:
        return [f"{stale} and it is ready to run, but gets {cpu_share:.0%} of a core: the machine is too busy."]
    if state == "blocked" and cpu_share is not None and cpu_share < 0.1:
        return [f"{stale} while the process sleeps: C code holds the interpreter lock and waits with it."]
    return [f"{stale} while the process runs: C code holds the interpreter lock."]


def _ending(stat: _Stat) -> str:
    code = os.waitstatus_to_exitcode(stat.exit_status)
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _read_log_tails(paths: tuple[str, ...], log_lines: int, unseen: list[str]) -> dict[str, str]:
    tails = {}
    for path in paths:
        try:
            tails[path] = _read_tail(path, log_lines)
        except OSError as error:
            unseen.append(f"Its log {path}: {error.strerror}.")
    return tails


def _read_tail(path: str, log_lines: int) -> str:
    """The last lines, of the last kilobytes only; of a line that was written over (a progress bar) what remained."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_LOG_BYTES))
        text = file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
    lines = text.rstrip().split("\n")
    if size > _MAX_LOG_BYTES and len(lines) > 1:
        del lines[0]  # a part of a line
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines[-log_lines:])
