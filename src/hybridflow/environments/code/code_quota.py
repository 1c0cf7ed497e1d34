"""The scorer's end of seccomp notifications: allows a number of files and threads per test, and denies the rest."""

import errno
import fcntl
import struct
from contextlib import suppress

MAX_CREATED_FILES = 64
"""Files, directories and links that a test may create; opening a file again with a mode that creates it counts."""

MAX_STARTED_THREADS = 256
"""Threads that a test may start."""

_NOTIFICATION = struct.Struct("QIIiIQ6Q")  # id, pid, flags, system call, architecture, address, arguments
_ANSWER = struct.Struct("QqiI")  # id, value, error, flags
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND
_CONTINUE = 1


class CodeQuota:
    """Calls that a test may still make; `clone` is the number of the system call that starts a thread.

    The kernel makes the call itself after a permission. What decides is the number of the call, which the program
    cannot change in the meantime.
    """

    def __init__(self, listener: int, clone: int) -> None:
        self.listener = listener
        self._clone = clone
        self._files_left, self._threads_left = MAX_CREATED_FILES, MAX_STARTED_THREADS

    def answer(self) -> None:
        """Answer a notification; call it when the listener is readable."""
        notification = bytearray(_NOTIFICATION.size)
        with suppress(OSError):  # the process was killed in the meantime
            fcntl.ioctl(self.listener, _RECEIVE, notification)
            number, _, _, call, *_ = _NOTIFICATION.unpack(notification)
            error = self._count(call)
            fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(number, 0, -error, 0 if error else _CONTINUE))

    def _count(self, call: int) -> int:
        """Return the error of the call, 0 if it is permitted."""
        if call == self._clone:
            self._threads_left -= 1
            return errno.EAGAIN if self._threads_left < 0 else 0
        self._files_left -= 1
        return errno.EDQUOT if self._files_left < 0 else 0
