"""A report of what a process on this node is doing, as far as another process sees it, and of what could not be seen.

Knows /proc and py-spy; nothing of workers. Takes half a second or so and never waits longer than it was told, whatever
state the process is in, and leaves it undisturbed: it only reads.
"""

import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Literal

from hybridflow.runtime.process_address import ProcessAddress
from hybridflow.runtime.python_stacks import StacksError, ThreadStack, read_stacks

State = Literal["running", "blocked", "stopped", "zombie", "dead", "unknown"]

_STATES: dict[str, State] = {"R": "running", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "dead", "x": "dead"}
_LOOK_EVERY_S = 0.1
_MIN_LOOKS, _MAX_LOOKS = 3, 11
_MAX_LOG_BYTES = 2**15


@dataclass(frozen=True)
class ProcessReport:
    """What `report_process` saw; `str()` is the text for an error message."""

    pid: int
    hostname: str
    state: State
    """Of the main thread. "unknown" where this process cannot see it: another node, or no /proc."""
    cpu_share: float | None = None
    """Of one core, over all threads: 2.0 is two busy threads."""
    memory_bytes: int | None = None
    """Resident memory."""
    kernel_wait: str = ""
    """The kernel function in which the main thread sleeps."""
    findings: list[str] = field(default_factory=list)
    """What follows from the rest, in sentences."""
    stacks: str = ""
    """The Python stacks of all threads, most recent call first."""
    unseen: list[str] = field(default_factory=list)
    """What could not be seen and why, in sentences."""
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
    """Look at a process of this node; waits at most `timeout_s` for its stacks."""
    unseen: list[str] = []
    log_tail = _read_log_tails(address.log_paths, log_lines, unseen)
    elsewhere = _why_not_here(address)
    if elsewhere:
        unseen.append(elsewhere)
        state = "dead" if address.hostname == socket.gethostname() and not _has_process(address.pid) else "unknown"
        return ProcessReport(address.pid, address.hostname, state, unseen=unseen, log_tail=log_tail)

    looks = _look_for_a_while(address, timeout_s)
    if looks.state in ("dead", "zombie"):
        unseen.append("What it was doing: its stacks were in its memory and ended with it.")
    elif not looks.stacks:
        unseen.append(f"Its stacks: {looks.problem}")
    else:
        unseen.append(
            f"Frames below Python (C, C++, CUDA); `py-spy dump --native --pid {address.pid}` or gdb may show them."
        )
    return ProcessReport(
        pid=address.pid,
        hostname=address.hostname,
        state=looks.state,
        cpu_share=looks.cpu_share,
        memory_bytes=looks.memory_bytes,
        kernel_wait=_read_kernel_wait(address.pid) if looks.is_alive else "",
        findings=_find(address, looks),
        stacks="\n".join(map(str, looks.stacks[-1])) if looks.is_alive and looks.stacks else "",
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
class _Looks:
    """What several looks at a process saw."""

    state: State
    """At most of them."""
    cpu_share: float | None = None
    """Between the first and the last."""
    memory_bytes: int | None = None
    stacks: list[list[ThreadStack]] = field(default_factory=list)
    """Of each look that could read them."""
    problem: str = ""
    """Why a look could not."""
    exit_status: int = 0

    @property
    def is_alive(self) -> bool:
        return self.state not in ("dead", "zombie")

    @property
    def is_starved(self) -> bool:
        """Whether the process is ready to run but gets hardly any processor."""
        return self.state == "running" and self.cpu_share is not None and self.cpu_share < 0.1

    @property
    def lock_holder(self) -> ThreadStack | None:
        """The thread that held the interpreter lock at one and the same line in every look."""
        holders = [next((thread for thread in threads if thread.holds_lock), None) for threads in self.stacks]
        if len(holders) < _MIN_LOOKS or len({holder and (holder.name, holder.frames) for holder in holders}) > 1:
            return None
        return holders[-1]


def _look_for_a_while(address: ProcessAddress, timeout_s: float) -> _Looks:
    """Look three times, or more often at a process that seems to get no processor: its turn may come."""
    start, stats, looks = time.monotonic(), [], _Looks("blocked")
    while len(stats) < _MIN_LOOKS or (looks.is_starved and len(stats) < _MAX_LOOKS):
        if stats:
            time.sleep(_LOOK_EVERY_S)
        left_s = start + timeout_s - time.monotonic()
        if not looks.problem and left_s > 0:
            try:
                looks.stacks.append(read_stacks(address.pid, left_s))
            except StacksError as error:
                looks.problem = str(error)
        stat = _read_stat(address)  # after the stacks: it tells whether they were of this very process
        if stat is None or stat.state in ("dead", "zombie"):
            return _Looks("dead") if stat is None else _Looks(stat.state, exit_status=stat.exit_status)
        stats.append((time.monotonic(), stat))
        (first_at, first), (last_at, last) = stats[0], stats[-1]
        seconds = (last.cpu_ticks - first.cpu_ticks) / os.sysconf("SC_CLK_TCK")
        looks.cpu_share = seconds / max(last_at - first_at, 1e-9)
        looks.memory_bytes = last.memory_bytes
        is_running = sum(stat.state == "running" for _, stat in stats) > len(stats) / 2
        looks.state = "stopped" if last.state == "stopped" else "running" if is_running else "blocked"
    return looks


def _read_stat(address: ProcessAddress) -> _Stat | None:
    """What the kernel says of the very process; None if it is gone, even if another one has its pid."""
    fields = _read_stat_fields(address.pid)
    if fields is None or int(fields[19]) != address.start_ticks:
        return None
    return _Stat(
        state=_STATES.get(fields[0], "blocked"),  # S and I sleep, D sleeps deaf to signals
        cpu_ticks=int(fields[11]) + int(fields[12]),
        memory_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        exit_status=int(fields[49]),
    )


def _read_stat_fields(pid: int) -> list[str] | None:
    """/proc/<pid>/stat from the third field on, the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _why_not_here(address: ProcessAddress) -> str:
    """Why this process cannot look at that one; "" if it can."""
    if socket.gethostname() != address.hostname:
        return f"It runs on {address.hostname}, this is {socket.gethostname()}: only a process on its node sees it."
    if address.start_ticks is None:
        return "Anything of it: its system has no /proc."
    if os.readlink("/proc/self/ns/pid") != address.pid_namespace:
        return "It runs in another container (pid namespace) of this node: only a process in there sees it."
    return ""


def _has_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _read_kernel_wait(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def _find(address: ProcessAddress, looks: _Looks) -> list[str]:
    if looks.state == "dead":
        if _read_stat_fields(address.pid) is None:
            return ["It has ended."]
        return [f"It has ended; pid {address.pid} now belongs to another process, which was left alone."]
    if looks.state == "zombie":
        return [f"It has ended {_ending(looks.exit_status)}; its parent has not noticed yet."]
    if looks.state == "stopped":
        return ["It is stopped: by SIGSTOP, Ctrl-Z or a debugger. `kill -CONT` lets it go on."]
    if looks.is_starved:
        return [f"It is ready to run, but gets {looks.cpu_share:.0%} of a core: the machine is too busy."]
    holder = looks.lock_holder
    if holder is None:
        return []
    held = f"Thread {holder.name} held the interpreter lock at the same line in {len(looks.stacks)} looks"
    if looks.state == "blocked" and not holder.is_active:
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
    """The last lines, of the last kilobytes only; of a line that was written over (a progress bar) what remained."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MAX_LOG_BYTES))
        text = file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
    lines = text.rstrip().split("\n")
    if size > _MAX_LOG_BYTES and len(lines) > 1:
        del lines[0]  # a part of a line
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines[-log_lines:])
