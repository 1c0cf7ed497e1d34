"""Python stacks of another process of this node, read by py-spy from its memory, and of this process."""

import json
import shutil
import subprocess
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass

NO_PERMISSION = (
    "py-spy has no permission to read the memory of the process; set kernel.yama.ptrace_scope to 0 or 1, or give the "
    "container CAP_SYS_PTRACE."
)


class StacksError(Exception):
    """The error for stacks that cannot be read, with the reason."""


@dataclass(frozen=True)
class ThreadStack:
    """A Python thread with its frames, most recent call first, as `File "...", line N in function`."""

    name: str
    is_active: bool
    """Whether the thread uses the CPU."""
    holds_lock: bool
    """Whether the thread holds the interpreter lock (GIL)."""
    frames: tuple[str, ...]

    def __str__(self) -> str:
        lock = ", holds the interpreter lock" if self.holds_lock else ""
        return "\n".join(
            [
                f"Thread {self.name} ({'active' if self.is_active else 'idle'}{lock}):",
                *(f"  {frame}" for frame in self.frames),
            ]
        )


def read_stacks(pid: int, timeout_s: float) -> list[ThreadStack]:
    """Return the threads of a process, the main thread first, without pausing or signaling it.

    Raises StacksError if py-spy is missing, lacks permission, fails, or takes longer than `timeout_s`.
    """
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        raise StacksError("py-spy is not installed; run `pip install py-spy`.")
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise StacksError(f"py-spy did not finish in {timeout_s:g} s.") from None
    except OSError as error:
        raise StacksError(f"py-spy cannot be started ({error}).") from error
    if done.returncode != 0:
        if "permission denied" in done.stderr.lower() or "operation not permitted" in done.stderr.lower():
            raise StacksError(NO_PERMISSION)
        reason = " ".join(done.stderr.partition("Stack backtrace")[0].split())
        raise StacksError(f"py-spy failed with exit code {done.returncode} ({reason}).")
    threads = [
        ThreadStack(
            thread["thread_name"] or hex(thread["thread_id"]),
            thread["active"],
            thread["owns_gil"],
            tuple(f'File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}' for frame in thread["frames"]),
        )
        for thread in json.loads(done.stdout)
    ]
    return sorted(threads, key=lambda thread: thread.name != "MainThread")


def own_stacks() -> str:
    """Return the Python stacks of all threads of this process, calling thread first, most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != own)
    parts = []
    for ident, frame in frames:
        stack = traceback.format_stack(frame.f_back if ident == own else frame)  # without this function
        title = f"Thread {names.get(ident, hex(ident))}{', the calling thread' if ident == own else ''}"
        parts.append("".join([f"{title} (most recent call last):\n", *stack]))
    return "\n".join(parts)
