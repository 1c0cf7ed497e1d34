"""The identity of this process for an observer on the same node, and the permission to read its memory."""

import ctypes
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


@dataclass(frozen=True)
class ProcessAddress:
    """The identity of a process, as `report_process` needs it; picklable."""

    pid: int
    start_ticks: int
    """Field 22 of `/proc/<pid>/stat`, which differs for a later process with the same pid."""
    hostname: str
    pid_namespace: str
    """The link `/proc/<pid>/ns/pid`, since the same pid is another process in another container."""
    log_paths: tuple[str, ...]
    """The files behind stdout and stderr."""


def own_address() -> ProcessAddress:
    """Return the address of this process."""
    namespace = os.readlink("/proc/self/ns/pid")
    return ProcessAddress(os.getpid(), _read_start_ticks(), socket.gethostname(), namespace, _log_paths())


def allow_observers() -> None:
    """Let any process of the same user read this process's memory, as py-spy does for stacks.

    With kernel.yama.ptrace_scope=1, as on Ubuntu, only its ancestors may otherwise. Without Yama nothing changes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def _read_start_ticks() -> int:
    # The second field is a name in parentheses, which may contain spaces and parentheses.
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def _log_paths() -> tuple[str, ...]:
    """Return the paths of stdout and stderr, without duplicates, if they are files that still exist."""
    paths = []
    for fd in (1, 2):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if os.path.isfile(path) and os.path.samestat(os.stat(path), os.fstat(fd)):
                paths.append(path)
    return tuple(dict.fromkeys(paths))
