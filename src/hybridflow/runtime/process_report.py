"""A report on the state of another process of this node, and on information that is not available.

It knows /proc and py-spy, but no workers. It only reads, so that the process is not disturbed, and does not exceed its
timeout in any state of the process.
"""

import os
import signal
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent
from typing import Literal

import psutil

from hybridflow.runtime.process_address import ProcessAddress
from hybridflow.runtime.python_stacks import StacksError, read_stacks

State = Literal["running", "blocked", "stopped", "zombie", "dead", "unknown"]

_STATES: dict[str, State] = {"R": "running", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "dead", "x": "dead"}
_MAX_LOG_BYTES = 2**15
CRASH = "Fatal Python error: "


@dataclass(frozen=True)
class ProcessReport:
    """The result of `report_process`; `str()` is the text for an error message."""

    pid: int
    hostname: str
    state: State
    """State of the main thread; "unknown" on another node."""
    memory_bytes: int | None = None
    """Resident memory in bytes."""
    kernel_wait: str = ""
    """The kernel function in which the main thread sleeps."""
    finding: str = ""
    """The meaning of the state, as a sentence."""
    stacks: str = ""
    """The Python stacks of all threads, most recent call first, with who holds the interpreter lock."""
    unseen: list[str] = field(default_factory=list)
    """Missing information with the reason, in sentences."""
    log_tail: dict[str, str] = field(default_factory=dict)
    """The last lines of each log file."""

    def __str__(self) -> str:
        figures = []
        if self.memory_bytes is not None:
            figures.append(f"it has {self.memory_bytes / 2**20:.0f} MiB in memory")
        if self.kernel_wait:
            figures.append(f"its main thread waits in the kernel's {self.kernel_wait}")
        head = f"Process {self.pid} on {self.hostname} is {self.state}"
        lines = [f"{head}; {', '.join(figures)}." if figures else f"{head}."]
        lines += [self.finding] if self.finding else []
        if self.stacks:
            lines += ["Its Python stacks, most recent call first:", indent(self.stacks, "  ")]
        for path, text in self.log_tail.items():
            lines += [f"The end of {path}:", indent(text, "  ")]
        if self.unseen:
            lines += ["Not seen:", *(f"  - {sentence}" for sentence in self.unseen)]
        return "\n".join(lines)


def report_process(address: ProcessAddress, *, timeout_s: float = 3.0, log_lines: int = 20) -> ProcessReport:
    """Return a report on a process of this node; waits at most `timeout_s` for its stacks."""
    unseen: list[str] = []
    log_tail = _read_log_tails(address.log_paths, log_lines, unseen)
    reason = _why_not_visible(address)
    if reason:
        unseen.append(reason)
        state = "dead" if address.hostname == socket.gethostname() and not psutil.pid_exists(address.pid) else "unknown"
        return ProcessReport(address.pid, address.hostname, state, unseen=unseen, log_tail=log_tail)

    stacks, problem = "", ""
    try:
        stacks = "\n".join(map(str, read_stacks(address.pid, timeout_s)))
    except StacksError as error:
        problem = str(error)
    stat = _read_stat(address)  # after the stacks, to verify that they belong to this process
    if stat is None or stat.state in ("dead", "zombie"):
        unseen.append("Its Python stacks: the process has exited.")
    elif problem:
        unseen.append(f"Its Python stacks: {problem}")
    else:
        unseen.append(
            f"Frames below Python (C, C++, CUDA); `py-spy dump --native --pid {address.pid}` or gdb may show them."
        )
    report = ProcessReport(address.pid, address.hostname, "dead", unseen=unseen, log_tail=log_tail)
    if stat is None:
        is_used_again = _read_stat_fields(address.pid) is not None
        again = f"; pid {address.pid} now belongs to another process" if is_used_again else ""
        return replace(report, finding=f"It has exited{again}.")
    if stat.state in ("dead", "zombie"):
        ending = _ending(stat.exit_status)
        finding = f"It exited {ending}; its parent process has not collected the exit status yet."
        return replace(report, state=stat.state, finding=finding)
    return replace(
        report,
        state=stat.state,
        memory_bytes=stat.memory_bytes,
        kernel_wait=_read_kernel_wait(address.pid),
        finding=STOPPED if stat.state == "stopped" else "",
        stacks=stacks,
    )


STOPPED = "It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."


@dataclass(frozen=True)
class _Stat:
    state: State
    memory_bytes: int
    exit_status: int


def has_exited(address: ProcessAddress) -> bool:
    """Return whether a process has exited; false for one that cannot be seen from here."""
    if _why_not_visible(address):
        return False
    stat = _read_stat(address)
    return stat is None or stat.state in ("dead", "zombie")


def _read_stat(address: ProcessAddress) -> _Stat | None:
    """Return the kernel's data on this process; None if it has exited, even if another process has its pid."""
    fields = _read_stat_fields(address.pid)
    if fields is None or int(fields[19]) != address.start_ticks:
        return None
    return _Stat(
        state=_STATES.get(fields[0], "blocked"),  # S and I: sleeping, D: uninterruptible sleep
        memory_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        exit_status=int(fields[49]),
    )


def _read_stat_fields(pid: int) -> list[str] | None:
    """Return the fields of `/proc/<pid>/stat` from the third one on, the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _why_not_visible(address: ProcessAddress) -> str:
    """Return why this process cannot see that one, or "" if it can."""
    if socket.gethostname() != address.hostname:
        return (
            f"It runs on {address.hostname}, but this is {socket.gethostname()}: only a process on its node can see it."
        )
    if os.readlink("/proc/self/ns/pid") != address.pid_namespace:
        return "It runs in another container (pid namespace) of this node: only a process in that container can see it."
    return ""


def _read_kernel_wait(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def _ending(exit_status: int) -> str:
    code = os.waitstatus_to_exitcode(exit_status)
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
    """Return the last lines of the last kilobytes; for an overwritten line (a progress bar) its final text.

    The first line of Python's report of a crash is kept: it names the signal, and a deep stack follows it.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_LOG_BYTES))
        text = file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
    lines = text.rstrip().split("\n")
    if size > _MAX_LOG_BYTES and len(lines) > 1:
        del lines[0]  # incomplete
    crash = [line for line in lines[:-log_lines] if line.startswith(CRASH)][-1:]
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in [*crash, *lines[-log_lines:]])
