"""Calls in a forked child process, which is killed at a limit of time or memory wherever it is stuck.

For calls into C that hold the interpreter: no alarm of this process interrupts those.
"""

import builtins
import contextlib
import ctypes
import gc
import os
import resource
import signal
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_RAISED = (TypeError, ValueError, MemoryError, RecursionError, OverflowError)


class ChildError(Exception):
    """What a call raised in the child, as text, unless that is one of Python's own exceptions."""


class ChildServer:
    """A forked child that answers calls of one function, each with the state of this process at the fork.

    The child's standard error is discarded: libraries in Rust describe there what they also raise. It ends with this
    process.
    """

    def __init__(self, function: Callable[..., Any], memory_bytes: int) -> None:
        self._calls, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads: the child uses none of their locks
            self._pid = os.fork()
        if self._pid == 0:
            with contextlib.suppress(BaseException):
                self._calls.close()
                _prepare(memory_bytes)
                _serve(function, theirs)
            os._exit(0)
        theirs.close()

    def call(self, limit_s: float, *arguments: Any) -> Any:
        """Return the function's result.

        Raises TimeoutError after `limit_s`, MemoryError if the child died, probably of its memory limit, and
        ChildError or one of Python's exceptions for an error of the function. After the first two the child has ended.
        """
        try:
            self._calls.send(arguments)
            is_result, answer = self._calls.recv() if self._calls.poll(limit_s) else (None, None)
        except (EOFError, OSError) as error:
            self.close()
            raise MemoryError("the memory limit, or a crash") from error
        except BaseException:  # also an interrupt: the answer would be taken for that of the next call
            self.close()
            raise
        if is_result is None:
            self.close()
            raise TimeoutError(f"no answer within {limit_s:.0f} s")
        if not is_result:
            name, text = answer or ("", "")
            kind = getattr(builtins, name, ChildError)
            raise (kind if kind in _RAISED else ChildError)(text)
        return answer

    @property
    def has_ended(self) -> bool:
        """Whether no call can be made any more."""
        return not self._pid

    def close(self) -> None:
        """End the child."""
        self._calls.close()
        pid, self._pid = self._pid, 0  # first: two threads may end it, and 0 names the group of this process
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _prepare(memory_bytes: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # which a whole group may get; this process decides, and ends it
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # objects of the parent, whose finalizers may wait for its threads, are not collected here
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(OSError):  # the kernel, short of memory, kills the child first
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = used + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _serve(function: Callable[..., Any], calls: Connection) -> None:
    while True:
        arguments = calls.recv()
        try:
            answer = True, function(*arguments)
        except BaseException as error:  # a panic of Rust is not an Exception
            answer = False, (type(error).__name__, str(error) or type(error).__name__)
        calls.send(answer)
