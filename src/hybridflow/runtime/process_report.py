"""A report on the state of another process of this node, and on information that is not available.

It knows /proc and py-spy, but no workers. It only reads, so that the process is not disturbed. It takes about half a
second, and does not exceed its timeout in any state of the process.
"""

import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Literal

import psutil

from hybridflow.runtime.process_address import ProcessAddress
from hybridflow.runtime.python_stacks import StacksError, ThreadStack, read_stacks

State = Literal["running", "blocked", "stopped", "zombie", "dead", "unknown"]

_STATES: dict[str, State] = {"R": "running", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "dead", "x": "dead"}
_SAMPLE_EVERY_S = 0.1
_MIN_SAMPLES, _MAX_SAMPLES = 3, 11
_MAX_LOG_BYTES = 2**15
CRASH = "Fatal Python error: "


@dataclass(frozen=True)
class ProcessReport:
    """The result of `report_process`; `str()` is the text for an error message."""

    pid: int
    hostname: str
    state: State
    """State of the main thread; "unknown" on another node and without /proc."""
    cpu_share: float | None = None
    """CPU time of all threads as a share of one core: 2.0 is two busy threads."""
    memory_bytes: int | None = None
    """Resident memory in bytes."""
    kernel_wait: str = ""
    """The kernel function in which the main thread sleeps."""
    findings: list[str] = field(default_factory=list)
    """Conclusions from the other values, in sentences."""
    stacks: str = ""
    """The Python stacks of all threads, most recent call first."""
    unseen: list[str] = field(default_factory=list)
    """Missing information with the reason, in sentences."""
    log_tail: dict[str, str] = field(default_factory=dict)
    """The last lines of each log file."""

    def __str__(self) -> str:
        figures = []
        if self.cpu_share is not None:
            figures.append(f"it uses {self.cpu_share:.0%} of a core")
        if self.memory_bytes is not None:
            figures.append(f"it has {self.memory_bytes / 2**20:.0f} MiB in memory")
        if self.kernel_wait:
            figures.append(f"its main thread waits in the kernel's {self.kernel_wait}")
        head = f"Process {self.pid} on {self.hostname} is {self.state}"
        lines = [f"{head}; {', '.join(figures)}." if figures else f"{head}."]
        lines += self.findings
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

    samples = _sample(address, timeout_s)
    if samples.state in ("dead", "zombie"):
        unseen.append("Its Python stacks: the process has exited.")
    elif not samples.stacks:
        unseen.append(f"Its Python stacks: {samples.problem}")
    else:
        unseen.append(
            f"Frames below Python (C, C++, CUDA); `py-spy dump --native --pid {address.pid}` or gdb may show them."
        )
    return ProcessReport(
        pid=address.pid,
        hostname=address.hostname,
        state=samples.state,
        cpu_share=samples.cpu_share,
        memory_bytes=samples.memory_bytes,
        kernel_wait=_read_kernel_wait(address.pid) if samples.is_alive else "",
        findings=_find(address, samples),
        stacks="\n".join(map(str, samples.stacks[-1])) if samples.is_alive and samples.stacks else "",
        unseen=unseen,
        log_tail=log_tail,
    )


@dataclass(frozen=True)
class _Stat:
    state: State
    cpu_ticks: int
    memory_bytes: int
    exit_status: int


@dataclass
class _Samples:
    """The result of several samples of the state of a process."""

    state: State
    """The state in most of the samples."""
    cpu_share: float | None = None
    """Share of one core between the first and the last sample."""
    memory_bytes: int | None = None
    stacks: list[list[ThreadStack]] = field(default_factory=list)
    """Stacks of each sample that could read them."""
    problem: str = ""
    """The reason why a sample could not read the stacks."""
    exit_status: int = 0

    @property
    def is_alive(self) -> bool:
        return self.state not in ("dead", "zombie")

    @property
    def is_starved(self) -> bool:
        """Whether the process is ready to run but gets almost no CPU time."""
        return self.state == "running" and self.cpu_share is not None and self.cpu_share < 0.1

    @property
    def lock_holder(self) -> ThreadStack | None:
        """The thread that held the interpreter lock at the same line in every sample."""
        holders = [next((thread for thread in threads if thread.holds_lock), None) for threads in self.stacks]
        if len(holders) < _MIN_SAMPLES or len({holder and (holder.name, holder.frames) for holder in holders}) > 1:
            return None
        return holders[-1]


def _sample(address: ProcessAddress, timeout_s: float) -> _Samples:
    """Sample three times, or more often a process that seems to get no CPU time, since it may be scheduled later."""
    start, stats, samples = time.monotonic(), [], _Samples("blocked")
    while len(stats) < _MIN_SAMPLES or (samples.is_starved and len(stats) < _MAX_SAMPLES):
        if stats:
            time.sleep(_SAMPLE_EVERY_S)
        left_s = start + timeout_s - time.monotonic()
        if not samples.problem and left_s > 0:
            try:
                samples.stacks.append(read_stacks(address.pid, left_s))
            except StacksError as error:
                samples.problem = str(error)
        stat = _read_stat(address)  # after the stacks, to verify that they belong to this process
        if stat is None or stat.state in ("dead", "zombie"):
            return _Samples("dead") if stat is None else _Samples(stat.state, exit_status=stat.exit_status)
        stats.append((time.monotonic(), stat))
        (first_at, first), (last_at, last) = stats[0], stats[-1]
        seconds = (last.cpu_ticks - first.cpu_ticks) / os.sysconf("SC_CLK_TCK")
        samples.cpu_share = seconds / max(last_at - first_at, 1e-9)
        samples.memory_bytes = last.memory_bytes
        is_running = sum(stat.state == "running" for _, stat in stats) > len(stats) / 2
        samples.state = "stopped" if last.state == "stopped" else "running" if is_running else "blocked"
    return samples


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
        cpu_ticks=int(fields[11]) + int(fields[12]),
        memory_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        exit_status=int(fields[49]),
    )


def _read_stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third one on, the state."""
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
    if address.start_ticks is None:
        return "Everything except its log: its system has no /proc."
    if os.readlink("/proc/self/ns/pid") != address.pid_namespace:
        return "It runs in another container (pid namespace) of this node: only a process in that container can see it."
    return ""


def _read_kernel_wait(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def _find(address: ProcessAddress, samples: _Samples) -> list[str]:
    if samples.state == "dead":
        if _read_stat_fields(address.pid) is None:
            return ["It has exited."]
        return [f"It has exited; pid {address.pid} now belongs to another process."]
    if samples.state == "zombie":
        return [f"It exited {_ending(samples.exit_status)}; its parent process has not collected the exit status yet."]
    if samples.state == "stopped":
        return ["It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."]
    if samples.is_starved:
        return [f"It is ready to run, but gets {samples.cpu_share:.0%} of a core: the machine is too busy."]
    holder = samples.lock_holder
    if holder is None:
        return []
    held = f"Thread {holder.name} held the interpreter lock at the same line in {len(samples.stacks)} samples"
    if samples.state == "blocked" and not holder.is_active:
        return [f"{held} while the process sleeps: C code holds the interpreter lock and waits with it."]
    return [f"{held} while the process runs: C code holds the interpreter lock, or a loop in that line does."]


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
