"""Supervisor of a reward process: when that process ends, no process that it has started and no temporary file stays.

    rank ──starts──> relay ──forks──> supervisor ──forks──> reward process ──starts──> anything

The supervisor is a child subreaper (prctl(2)): a process whose parent exits becomes its child, also after `setsid` and
after a double fork. So every process of the function stays below it, and it kills only what is below it. It sleeps
until the reward process ends, or until SIGTERM, which it also gets when the rank exits. The relay is there because Ray
sends SIGKILL to the children of a worker that exits: then the supervisor gets SIGTERM. Only the standard library is
imported.
"""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_AWAITED = (signal.SIGCHLD, signal.SIGTERM)


def supervise(clean_up: Callable[[], None]) -> None:
    """Fork a supervisor, and from it the process in which this returns, the leader of a new session.

    The supervisor and this process, the relay, exit as that one exits. When no process below it is left, the supervisor
    calls `clean_up`, which may raise OSError.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _fork_behind_relay()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    process = os.fork()
    if process:
        status = _status_of(process)
        _kill_all_below()
        with contextlib.suppress(OSError):  # the rank tries it again, and warns
            clean_up()
        _exit_as(status)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it exited before the line above
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def _fork_behind_relay() -> None:
    """Fork and return in the child; the parent passes SIGTERM on to it, and exits as it exits."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    relay, child = os.getpid(), os.fork()
    if not child:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != relay:  # it exited before the line above
            os._exit(1)
        return
    while True:
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            _send(child, signal.SIGTERM)
            _send(child, signal.SIGCONT)  # the function may have stopped it
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            _exit_as(status)


def _status_of(process: int) -> int:
    """Return the wait status of the process once it has exited; after SIGTERM, the status of an exit by that signal."""
    while signal.sigwait(_AWAITED) == signal.SIGCHLD:
        ended = 1
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == process:
                return status
    return signal.SIGTERM


def _kill_all_below() -> None:
    """Kill all processes below this one, and wait until they have exited.

    They are stopped first, from the top down: a stopped process starts no others and reaps none, so an id stays that
    of the same process until it is killed.
    """
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            stopped: list[int] = []
            while new := [process for process in _all_below() if process not in stopped]:
                for process in new:
                    _send(process, signal.SIGSTOP)
                stopped += new
            for process in stopped:
                _send(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def _all_below() -> list[int]:
    """Return the processes below this one, a parent before its children."""
    from psutil import Process  # takes long, and is needed only if some are left

    return [process.pid for process in Process().children(recursive=True)]


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # it has exited, or belongs to another user
        os.kill(process, number)


def _exit_as(status: int) -> NoReturn:
    """Exit with this status of `os.waitpid`, by the same signal if there was one."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the process itself has written its core file
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # the handler of SIGKILL cannot be set
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(abs(os.waitstatus_to_exitcode(status)))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
