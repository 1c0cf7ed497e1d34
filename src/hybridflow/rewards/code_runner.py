"""Runs a program against one test in a separate restricted process and removes its files and processes.

program ──file──> process ──stdout──> compared by the caller
statements, number ──socket──> process ──socket──> the number again
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hybridflow.errors import RewardError
from hybridflow.rewards.code_process import PROGRAM
from hybridflow.rewards.syscall_filter import OWN_ID, filter_program

_SCRIPT = Path(__file__).with_name("code_process.py")
_START_TIMEOUT_S = 60.0
_MAX_LINE_BYTES = 4096


@dataclass(frozen=True)
class CodeLimits:
    """Limits of one test: seconds of CPU time (twice as many of wall-clock time) and bytes."""

    timeout_s: float
    memory_bytes: int
    max_output_bytes: int


@dataclass(frozen=True)
class CodeRun:
    """Result of a run: whether the program compiled, whether it and the statements finished, and its stdout."""

    compiled: bool
    finished: bool = False
    output: bytes = b""


def run_program(program: bytes, limits: CodeLimits, *, stdin: bytes = b"", statements: bytes | None = None) -> CodeRun:
    """Run the program with this input, or run the statements after it in its namespace.

    A program has finished if its exit status is 0, statements if neither they nor the program raised or exited.
    Raises `RewardError` if this system cannot restrict the process; the program has not run then.
    """
    directory = tempfile.mkdtemp(prefix="hybridflow-code-")
    ours, theirs = socket.socketpair()
    try:
        (Path(directory) / PROGRAM).write_bytes(program)
        with ours, theirs, _memory_file(stdin) as given, _memory_file(b"") as output:
            process = _start(directory, limits, theirs.fileno(), given.fileno(), output.fileno(), statements is None)
            theirs.close()
            try:
                compiled, finished = _exchange(process, _Line(ours), limits, statements)
            finally:
                _kill(process)
            output.seek(0)
            return CodeRun(compiled, finished, output.read(limits.max_output_bytes))
    finally:
        _remove(directory)


def _memory_file(contents: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("hybridflow-code"), "w+b")
    file.write(contents)
    file.seek(0)
    return file


def _start(
    directory: str, limits: CodeLimits, line: int, stdin: int, stdout: int, is_script: bool
) -> subprocess.Popen[bytes]:
    settings = {
        "line": line,
        "is_script": is_script,
        "write_bytecode": not sys.dont_write_bytecode,
        "cpu_s": limits.timeout_s,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.max_output_bytes,
        "filter": _filter().hex(),
        "own_id": OWN_ID.hex(),
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", str(_SCRIPT), json.dumps(settings)],
        stdin=stdin,
        stdout=stdout if is_script else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=directory,
        env={},
        pass_fds=(line,),
        start_new_session=True,
    )


def _filter() -> bytes:
    try:
        return filter_program(os.uname().machine)
    except OSError as error:
        raise _cannot_restrict(str(error)) from error


def _cannot_restrict(problem: str) -> RewardError:
    return RewardError(
        f"code_reward cannot restrict programs on this machine, so no program was run: {problem}. "
        "It needs Linux 5.13 or newer on x86_64 or aarch64 with Landlock and seccomp, and a Python with ctypes; "
        "score code on such a machine."
    )


class _Line:
    """Exchange of text lines with the process, until a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._received = connection, b""
        self.deadline = time.monotonic() + _START_TIMEOUT_S

    def receive_line(self) -> bytes:
        """Return the next line; b"" at the end, for a line that is too long, and after the deadline."""
        while b"\n" not in self._received and len(self._received) <= _MAX_LINE_BYTES:
            chunk = self._receive()
            if not chunk:
                return b""
            self._received += chunk
        line, newline, self._received = self._received.partition(b"\n")
        return line if newline else b""

    def send(self, contents: bytes) -> bool:
        """Send the contents and return whether the process received them in time."""
        with suppress(OSError):
            self._connection.settimeout(self._seconds_left())
            self._connection.sendall(contents)
            return True
        return False

    def wait_for_end(self) -> None:
        """Wait until the process has exited, has closed the connection, or the deadline has passed."""
        while time.monotonic() < self.deadline and self._receive():
            pass

    def _receive(self) -> bytes:
        with suppress(OSError):
            self._connection.settimeout(self._seconds_left())
            return self._connection.recv(_MAX_LINE_BYTES)
        return b""

    def _seconds_left(self) -> float:
        return max(0.001, self.deadline - time.monotonic())


def _exchange(
    process: subprocess.Popen[bytes], line: _Line, limits: CodeLimits, statements: bytes | None
) -> tuple[bool, bool]:
    """Return (compiled, finished); code_process.py documents the protocol."""
    first = line.receive_line()
    if first != b"ready":
        no_line = f"its process did not start with memory_bytes={limits.memory_bytes}"
        raise _cannot_restrict(first.decode(errors="replace") or no_line)
    line.deadline = time.monotonic() + 2 * limits.timeout_s
    if line.receive_line() != b"compiled":
        return False, False
    if statements is None:
        line.wait_for_end()
        with suppress(subprocess.TimeoutExpired):
            return True, process.wait(max(0.001, line.deadline - time.monotonic())) == 0
        return True, False
    number = secrets.token_hex(16).encode()
    finished = (
        line.receive_line() == b"loaded"
        and line.send(len(statements).to_bytes(4, "little") + statements)
        and line.receive_line() == b"done"
        and line.send(number)
        and line.receive_line() == number
    )
    return True, finished


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group, which no child can leave."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _remove(directory: str) -> None:
    """Remove a directory, without recursion: a program may have nested it deeper than a path can name."""
    num_moved = 0
    while entries := list(os.scandir(directory)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                num_moved += 1
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # moving a directory needs write permission on it
                os.rename(inner.path, os.path.join(directory, f"{num_moved}-moved"))
            os.rmdir(entry.path)
    os.rmdir(directory)
