"""Runs a program against one test in separate restricted processes and removes its files and processes.

program ──file──> process ──stdout──> compared by the caller
program ──file──> process <──code of the test; its values and its verdict──> checks
creation of a file or a thread ──notification──> allowed up to a number of them
"""

import errno
import fcntl
import marshal
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hybridflow.environments.code.code_checks import Steps
from hybridflow.environments.code.code_process import PROGRAM
from hybridflow.environments.code.code_values import IDLE, PASSED
from hybridflow.environments.code.syscall_filter import OWN_ID, Filters, filters_of
from hybridflow.environments.processes.tree_removal import remove_tree
from hybridflow.errors import RewardError

_SCRIPT = Path(__file__).with_name("code_process.py")
_START_TIMEOUT_S = 60.0
_SECRET_BYTES = 32
_MAX_CHUNK_BYTES = 2**16
MAX_MESSAGE_BYTES = 2**24
"""Size of a message, such as the value of an expression of a test."""

_LATE_SHARE = 0.9
"""Share of `timeout_s`, since the limit of CPU time includes the start of the interpreter and wall-clock time not."""

MAX_CREATED_FILES = 64
"""Files, directories and links that a test may create; opening a file again with a mode that creates it counts."""

MAX_STARTED_THREADS = 256
"""Threads that a test may start."""

_NOTIFICATION = struct.Struct("QIIiIQ6Q")  # id, pid, flags, system call, architecture, address, arguments
_ANSWER = struct.Struct("QqiI")  # id, value, error, flags
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND
_CONTINUE = 1


@dataclass(frozen=True)
class CodeLimits:
    """Limits of one test: seconds of CPU time (twice as many of wall-clock time) and bytes.

    No test runs beyond `deadline`, a time of `time.monotonic`.
    """

    timeout_s: float
    memory_bytes: int
    max_output_bytes: int
    deadline: float = math.inf


@dataclass(frozen=True)
class CodeRun:
    """Result of a run: whether the program compiled, whether it and the statements finished, and its stdout.

    `is_late`: it did not finish, and was stopped by a limit of time or took nearly as long.
    `is_idle`: the test has ended without an error, and has checked nothing.
    """

    compiled: bool
    finished: bool = False
    output: bytes = b""
    is_late: bool = False
    is_idle: bool = False


def run_program(program: bytes, limits: CodeLimits, *, stdin: bytes = b"", test: Steps | None = None) -> CodeRun:
    """Run the program with this input, or run it and then a test by statements.

    A program has finished if its exit status is 0, a test if neither it nor the program raised or exited, its checks
    hold, and at least one check has run.
    Raises `RewardError` if this system cannot restrict the process (the program has not run then), or cannot make or
    remove its directory.
    """
    try:
        filters = filters_of(os.uname().machine)
    except OSError as error:
        raise _cannot_restrict(str(error)) from error
    with _directory_with(program) as directory:
        try:
            with ExitStack() as stack:
                return _Run(limits, filters, stack, directory, stdin, test).result()
        except OSError as error:
            raise RewardError(
                f"code_reward cannot start the process of a program: {error}; free memory, processes or open files."
            ) from error


@contextmanager
def _directory_with(program: bytes) -> Iterator[str]:
    with _directory_errors():
        directory = tempfile.mkdtemp(prefix="hybridflow-code-")
        file = Path(directory) / PROGRAM
        try:
            file.write_bytes(program)
        except OSError:
            file.unlink(missing_ok=True)  # `remove_tree` would open the directory
            os.rmdir(directory)
            raise
    try:
        yield directory
    finally:
        with _directory_errors():
            remove_tree(directory)


@contextmanager
def _directory_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = tempfile.tempdir or os.environ.get("TMPDIR", "the temporary directory")
        raise RewardError(
            f"code_reward cannot use {place} for the files of programs: {error}; "
            "free space there, or set TMPDIR to a directory that is writable."
        ) from error


def _memory_file(contents: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("hybridflow-code"), "w+b")
    file.write(contents)
    file.seek(0)
    return file


def _cannot_restrict(problem: str) -> RewardError:
    return RewardError(
        f"code_reward cannot restrict programs on this machine, so no program was run: {problem}. "
        "It needs Linux 5.13 or newer on x86_64 or aarch64 with Landlock and seccomp, and a Python with ctypes; "
        "score code on such a machine."
    )


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


class _Run:
    """A process with one program, and its messages until a deadline; code_process.py documents them."""

    def __init__(
        self, limits: CodeLimits, filters: Filters, stack: ExitStack, directory: str, stdin: bytes, test: Steps | None
    ) -> None:
        self._limits, self._test, self._stack, self._clone = limits, test, stack, filters.clone
        self._secret = os.urandom(_SECRET_BYTES)
        self._quota: CodeQuota | None = None
        self._received = bytearray()
        self._deadline = time.monotonic() + _START_TIMEOUT_S
        given = stack.enter_context(_memory_file(stdin))
        self._output = stack.enter_context(_memory_file(b""))
        self._line, theirs = map(stack.enter_context, socket.socketpair())
        settings = {
            "line": theirs.fileno(),
            "is_script": test is None,
            "imports": () if test is None else test.imports,
            "secret": self._secret,
            "write_bytecode": not sys.dont_write_bytecode,
            "cpu_s": limits.timeout_s,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.max_output_bytes,
            "strict_filter": filters.strict,
            "counting_filter": filters.counting,
            "own_id": OWN_ID,
            "seccomp": filters.seccomp,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", str(_SCRIPT), marshal.dumps(settings).hex()],
                stdin=given,
                stdout=self._output if test is None else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env={},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        stack.callback(self._kill)
        self._exit = self._adopt(os.pidfd_open(self._process.pid))

    def result(self) -> CodeRun:
        """Wait for the program, and for the test if there is one; kill the process, and return what came of it."""
        for state in (b"ready", b"restricted"):
            message = self._receive_message()
            if message != state:
                no_message = f"its process did not start with memory_bytes={self._limits.memory_bytes}"
                raise _cannot_restrict(message.decode(errors="replace") or no_message)
        if self._quota is None:
            raise OSError(errno.EMFILE, "no descriptor left for the process")
        started = time.monotonic()
        self._deadline = min(started + 2 * self._limits.timeout_s, self._limits.deadline)
        compiled = self._receive_message() == b"compiled"
        verdict = self._verdict() if compiled else b""
        is_late = verdict != PASSED and time.monotonic() - started >= _LATE_SHARE * self._limits.timeout_s
        self._kill()
        self._output.seek(0)
        output = self._output.read(self._limits.max_output_bytes)
        return CodeRun(compiled, verdict == PASSED, output, is_late, verdict == IDLE)

    def _verdict(self) -> bytes:
        """Return the verdict of the process, which is b"" if it makes none or a check does not hold of its answers."""
        if self._test is None:
            return PASSED if self._wait_for(self._exit) and self._process.wait() == 0 else b""
        if self._receive_message() != self._secret:
            return b""
        try:
            self._line.settimeout(max(0.001, self._deadline - time.monotonic()))
            self._line.sendall(self._test.code)
            self._line.shutdown(socket.SHUT_WR)
        except OSError:  # the process has ended, or does not read
            return b""
        if not all(check.holds(self._receive_message()) for check in self._test.checks):
            return b""
        verdict = self._receive_message()
        return verdict.removeprefix(self._secret) if verdict.startswith(self._secret) else b""

    def _kill(self) -> None:
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _adopt(self, descriptor: int) -> int:
        """Have the descriptor closed at the end."""
        self._stack.callback(os.close, descriptor)
        return descriptor

    def _receive_message(self) -> bytes:
        """Return the next message; b"" at the end, for a message that is too long, and after the deadline."""
        length = int.from_bytes(self._receive_bytes(4), "little")
        return self._receive_bytes(length) if length <= MAX_MESSAGE_BYTES else b""

    def _receive_bytes(self, length: int) -> bytes:
        """Return the next bytes; b"" at the end and after the deadline."""
        while len(self._received) < length:
            if not self._receive():
                return b""
        contents, self._received = bytes(self._received[:length]), self._received[length:]
        return contents

    def _receive(self) -> bool:
        """Receive what the process has sent; return False at the end and after the deadline."""
        if not self._wait_for(self._line.fileno()):
            return False
        chunk, descriptors = b"", []
        with suppress(ConnectionResetError):
            chunk, descriptors, _, _ = socket.recv_fds(self._line, _MAX_CHUNK_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        for descriptor in map(self._adopt, descriptors):
            self._quota = self._quota or CodeQuota(descriptor, self._clone)
        self._received += chunk
        return bool(chunk)

    def _wait_for(self, descriptor: int) -> bool:
        """Wait until the descriptor is readable, and answer notifications; return False at the deadline."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if self._quota is not None:
            poll.register(self._quota.listener, select.POLLIN)
        while (seconds_left := self._deadline - time.monotonic()) > 0:
            for ready, events in poll.poll(1000 * seconds_left):
                if ready == descriptor:
                    return True
                if self._quota is not None and events & select.POLLIN:
                    self._quota.answer()
                else:
                    poll.unregister(ready)  # all processes have ended
        return False
