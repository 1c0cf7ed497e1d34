"""Ends what is left of a Ray cluster when the process it was started for has ended, however that ended.

`LocalCluster` runs this file as a process, `reaper.py SESSION DIRECTORY`, with a pipe as its standard input that only
the driver can write to: the end of the file is the end of the driver. It imports the standard library alone, so that
it starts at once. Where there is no /proc (macOS) no process can be found, and only the directory is removed.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator

SESSION_VARIABLE = "HYBRIDFLOW_RAY_SESSION"

_SHARED_MEMORY = "/dev/shm"
_GRACE_S = 1.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# A process between fork and exec does not show its token yet, so one look that finds nobody is not enough.
_LOOKS_WITHOUT_PROCESSES = 3


def cluster_processes(session: str) -> list[int]:
    """The living processes of this user that were started with the session's token, by id."""
    return [pid for pid in own_processes() if _carries(pid, session)]


def main() -> None:
    session, directory = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    started_s = time.time()
    while os.read(sys.stdin.fileno(), 1024):
        pass
    _end_processes(session)
    shutil.rmtree(directory, ignore_errors=True)
    _remove_object_stores(started_s)


def _end_processes(session: str) -> None:
    """SIGTERM, and SIGKILL after a short while, until nobody carries the token: new ones may be born meanwhile."""
    asked: set[int] = set()
    patience_ends_s = time.monotonic() + _GRACE_S
    pause_s = _FIRST_PAUSE_S
    looks_without_processes = 0
    while looks_without_processes < _LOOKS_WITHOUT_PROCESSES:
        # The parent is the driver as long as that lives. It carries the token if it has replaced itself by exec.
        pids = [pid for pid in cluster_processes(session) if pid not in (os.getpid(), os.getppid())]
        for pid in pids:
            if time.monotonic() >= patience_ends_s:
                _send(pid, session, signal.SIGKILL)
            elif pid not in asked:
                _send(pid, session, signal.SIGTERM)
                asked.add(pid)
        if pids:
            looks_without_processes = 0
            pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
        else:
            looks_without_processes += 1
            pause_s = _FIRST_PAUSE_S
        time.sleep(pause_s)


def _send(pid: int, session: str, number: signal.Signals) -> None:
    """Signal the process if it carries the token still; its id may have gone to another one since it was found."""
    with contextlib.suppress(OSError):  # it has ended by itself
        if not hasattr(os, "pidfd_open"):
            if _carries(pid, session):
                os.kill(pid, number)
            return
        # The descriptor stays with the process that is looked at next, whatever becomes of the number.
        descriptor = os.pidfd_open(pid)
        try:
            if _carries(pid, session):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def own_processes() -> Iterator[int]:
    """The processes of this user, by id; none where there is no /proc."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                yield int(name)


def _carries(pid: int, session: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{SESSION_VARIABLE}={session}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def _remove_object_stores(started_s: float) -> None:
    """Remove files of object stores that nobody has open.

    Ray takes the name away as soon as it has made the file, so one that still has it is of a store that was killed
    between the two.
    """
    if not os.path.isdir(_SHARED_MEMORY):
        return
    for entry in os.scandir(_SHARED_MEMORY):
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            is_own_store = re.fullmatch(r"plasma\w{6}", entry.name) and status.st_uid == os.geteuid()
            if is_own_store and status.st_ctime >= started_s and not is_open(status):
                os.unlink(entry.path)


def is_open(status: os.stat_result) -> bool:
    """Whether a process of this user has the file open."""
    for pid in own_processes():
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), status):
                        return True
    return False


if __name__ == "__main__":
    main()
