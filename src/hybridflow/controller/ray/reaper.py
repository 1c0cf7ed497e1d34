"""The reaper: removes the processes and files of a Ray cluster when its driver has exited, even after SIGKILL.

`LocalCluster` runs this file as a process, `reaper.py SESSION DIRECTORY`. Its standard input is a pipe that only the
driver can write to, so end of file means that the driver has exited. It imports only the standard library, so that it
starts at once.
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
# A process between fork and exec does not show its token yet, so one empty scan is not enough.
_EMPTY_SCANS = 3


def cluster_processes(session: str) -> list[int]:
    """Return the ids of this user's living processes that were started with the session's token."""
    return [pid for pid in own_processes() if _has_token(pid, session)]


def main() -> None:
    """Wait until the driver has exited, then remove the processes, directory and shared memory of its cluster."""
    session, directory = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    started_s = time.time()
    while os.read(sys.stdin.fileno(), 1024):
        pass
    left = _end_processes(session)
    for path in (directory, *left):
        shutil.rmtree(path, ignore_errors=True)
    _remove_shared_memory(started_s)


def _end_processes(session: str) -> set[str]:
    """Send SIGTERM, and SIGKILL after `_GRACE_S`, until no process has the token; new ones may start meanwhile.

    Return the temporary directories of reward processes, which remove their own unless they end while they start.
    """
    terminated: set[int] = set()
    directories: set[str] = set()
    grace_ends_s = time.monotonic() + _GRACE_S
    pause_s = _FIRST_PAUSE_S
    empty_scans = 0
    while empty_scans < _EMPTY_SCANS:
        # While the driver lives, it is the parent. It has the token if it has replaced itself by exec.
        pids = [pid for pid in cluster_processes(session) if pid not in (os.getpid(), os.getppid())]
        for pid in pids:
            directories.update(_temporary_directory(pid))
            if time.monotonic() >= grace_ends_s:
                _send(pid, session, signal.SIGKILL)
            elif pid not in terminated:
                _send(pid, session, signal.SIGTERM)
                terminated.add(pid)
        if pids:
            empty_scans = 0
            pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
        else:
            empty_scans += 1
            pause_s = _FIRST_PAUSE_S
        time.sleep(pause_s)
    return directories


def _temporary_directory(pid: int) -> Iterator[str]:
    """Yield the temporary directory of a process of user code, which has its own."""
    for variable in _environment(pid):
        name, _, value = os.fsdecode(variable).partition("=")
        if name == "TMPDIR" and re.fullmatch(r"hybridflow-(reward|environment)-\w+", os.path.basename(value)):
            yield value


def _send(pid: int, session: str, number: signal.Signals) -> None:
    """Signal the process if it still has the token; its id may belong to another process by now."""
    with contextlib.suppress(OSError):  # the process has exited by itself
        if not hasattr(os, "pidfd_open"):
            if _has_token(pid, session):
                os.kill(pid, number)
            return
        # The descriptor keeps referring to the process checked below, even if its id is reused.
        descriptor = os.pidfd_open(pid)
        try:
            if _has_token(pid, session):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def own_processes() -> Iterator[int]:
    """Yield the ids of this user's processes."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.geteuid():
                yield int(name)


def _has_token(pid: int, session: str) -> bool:
    return f"{SESSION_VARIABLE}={session}".encode() in _environment(pid)


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _remove_shared_memory(started_s: float) -> None:
    """Remove files of shared memory that were left by killed processes, and that no process has open.

    Ray unlinks the file of an object store as soon as it has created it, so a file that still has its name belongs to a
    store that was killed between the two. PyTorch unlinks its counts of CUDA IPC handles when the process that shares
    GPU memory exits, but not after SIGKILL; their name has the id of that process.
    """
    if not os.path.isdir(_SHARED_MEMORY):
        return
    for entry in os.scandir(_SHARED_MEMORY):
        with contextlib.suppress(OSError):
            if _is_left_snapshot(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                continue
            status = entry.stat(follow_symlinks=False)
            is_new = status.st_uid == os.geteuid() and status.st_ctime >= started_s
            if is_new and _may_be_left(entry.name) and not is_open(status):
                os.unlink(entry.path)


def _may_be_left(name: str) -> bool:
    """Return whether a file is an object store, or belongs to PyTorch in a process that has ended."""
    of_torch = re.fullmatch(r"torch_(\d+)_\d+_\d+", name)
    ended = of_torch is not None and not os.path.exists(f"/proc/{of_torch[1]}")
    return ended or re.fullmatch(r"plasma\w{6}", name) is not None


def _is_left_snapshot(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is the directory of snapshots of a driver of this user that has ended."""
    named = re.fullmatch(r"hybridflow-snapshots-(\d+)-[0-9a-f]{8}", entry.name)
    if named is None or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return False
    return entry.is_dir(follow_symlinks=False) and not os.path.exists(f"/proc/{named[1]}")


def is_open(status: os.stat_result) -> bool:
    """Return whether a process of this user has the file open."""
    for pid in own_processes():
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), status):
                        return True
    return False


if __name__ == "__main__":
    main()
