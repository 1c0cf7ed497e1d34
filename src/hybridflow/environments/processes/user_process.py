"""A process of user code, as the run sees it: started, asked, timed and killed.

    question ──pickle──> process of the user's code ──JSON──> answer

The run never unpickles what user code has produced.
"""

import asyncio
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from hybridflow.environments.processes.connection import HEAD, MARK, MAX_REPLY_BYTES
from hybridflow.environments.processes.tree_removal import remove_tree
from hybridflow.errors import RewardError

logger = logging.getLogger(__name__)

WATCH_S = 0.5
"""Interval, in seconds, of checking for a process that exited without closing its connection."""

EXIT_S = 1.0
"""Seconds that a process may take to exit after it has closed its connection."""

KILL_TIMEOUT_S = 60.0
"""Seconds that a supervisor may take to end its processes before it is killed itself."""

Reason = Literal["exited", "wrong reply", "late", "ended", "closed"]
Read = Callable[[Mapping[str, Any]], Any]
"""Returns the answer in a message; raises any exception for a message that is not one."""


class LostError(Exception):
    """A process was lost: the text says what its code did; "ended" and "closed" are done by the run."""

    def __init__(self, problem: str, reason: Reason) -> None:
        super().__init__(problem)
        self.reason: Reason = reason


class WrongReplyError(Exception):
    """Bytes on the connection that are not a reply of the process's program."""


class UserProcess:
    """A supervised process of a program (`kind`), and the questions that it has; used on the event loop.

    Its temporary directory (TMPDIR) is its own. The supervisor removes it, also if this process is killed; so does
    `kill`, which also ends all processes that it has started, even if the supervisor was killed.
    """

    def __init__(self, kind: str) -> None:
        self._loop, self._kind, self._temporary = asyncio.get_running_loop(), kind, _make_temporary(kind)
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("entry_point.py")), kind],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
                env={**os.environ, "TMPDIR": self._temporary},
            )
        self.connection.setblocking(False)  # user code that hangs stops reading
        self._to_send, self._received = bytearray(), bytearray()
        self.lost: asyncio.Future[LostError] = self._loop.create_future()  # known when it is killed
        self.is_lost = False
        self.answers_in_order = False
        self.has_repeated = False  # whether it has answered its last question again
        self._asked: dict[int, tuple[Read, Callable[[Any], object]]] = {}  # by number, the oldest first
        self._numbers, self._last_number = itertools.count(), -1
        self._kill_lock, self.is_killed = threading.RLock(), False
        self._killing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self.connection, self._read)
        self._watcher = self._loop.call_later(WATCH_S, self._watch)

    @property
    def is_alive(self) -> bool:
        """Whether the process is not lost and has not exited."""
        return not self.is_lost and self.popen.poll() is None

    def ask(self, read: Read, on_answer: Callable[[Any], object], *question: Any) -> None:
        """Send a question; `on_answer` gets what `read` returns of the reply, at once."""
        number = next(self._numbers)
        contents = pickle.dumps((number, *question))
        self._asked[number] = read, on_answer
        if not self._to_send:
            self._loop.call_soon(self._send)  # with all questions that are asked now
        self._to_send += HEAD.pack(MARK, len(contents)) + contents

    async def answer(self, read: Read, *question: Any) -> Any:
        """Return the answer to a question. Raises LostError if the process is lost before."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        if not self.is_lost:
            self.ask(read, lambda found: answer.done() or answer.set_result(found), *question)
        await asyncio.wait({answer, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise self.lost.result()
        return answer.result()

    def set_time_limit(self, seconds: float | None, problem: str = "") -> None:
        """Lose the process in so many seconds, in place of the limit before; None: there is no limit."""
        if self._timer:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.lose, problem, "late")

    def lose(self, problem: str, reason: Reason) -> None:
        """Expect nothing of the process any more, and kill it, unless its pool is "closed" and will do so."""
        if self.is_lost:
            return
        if reason == "late" and self.popen.poll() is not None:
            reason = "exited"
        self.is_lost = True
        self._watcher.cancel()
        if self._timer:
            self._timer.cancel()
        with suppress(OSError, ValueError):  # it was killed
            self._loop.remove_reader(self.connection)
            self._loop.remove_writer(self.connection)
        if reason == "closed":
            self.lost.set_result(LostError(problem, reason))
        else:
            self._killing = self._loop.create_task(self._kill_and_report(problem, reason))

    async def stop(self, problem: str) -> None:
        """Lose the process, and wait until it is killed."""
        self.lose(problem, "ended")
        await asyncio.shield(self.lost)

    def kill(self) -> None:
        """Kill the process and all processes that it has started, and wait for their end; may be called anywhere."""
        with self._kill_lock:
            if self.is_killed:
                return
            self.is_killed = True
            self.popen.terminate()
            self.popen.send_signal(signal.SIGCONT)  # user code may have stopped it
            try:
                self.popen.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
            self.connection.close()
            try:
                remove_tree(self._temporary)
            except OSError as error:
                logger.warning(
                    "'%s' of a process (%s) could not be removed (%s); remove it.", self._temporary, self._kind, error
                )

    async def _kill_and_report(self, problem: str, reason: Reason) -> None:
        try:
            if reason == "exited":  # its exit status is not to become that of the kill
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self.popen.wait, EXIT_S)
            await asyncio.to_thread(self.kill)
        finally:
            if reason == "exited":
                problem = f"ended its process: {_end_of(self.popen.returncode or 0)}"
            self.lost.set_result(LostError(problem, reason))

    def _watch(self) -> None:
        if self.popen.poll() is not None:  # a child of it may keep its connection open
            self.lose("", "exited")
        else:
            self._watcher = self._loop.call_later(WATCH_S, self._watch)

    def _send(self) -> None:
        """Send as much as the connection accepts, and the rest when it accepts more."""
        if self.is_lost:
            return
        try:
            del self._to_send[: self.connection.send(self._to_send)]
        except BlockingIOError:
            pass
        except OSError:  # it has exited, which `_read` notices
            self._to_send.clear()
        if self._to_send:
            self._loop.add_writer(self.connection, self._send)
        else:
            self._loop.remove_writer(self.connection)

    def _read(self) -> None:
        chunk = b""
        with suppress(ConnectionResetError):  # it exited with unread questions
            chunk = self.connection.recv(1 << 16)
        if not chunk:
            self.lose("", "exited")
        self._received += chunk
        try:
            for message in self._messages():
                self.handle(message)
        except WrongReplyError as error:
            self.lose(str(error), "wrong reply")

    def handle(self, message: Mapping[str, Any]) -> None:
        """Pass on the answer in a message. Raises WrongReplyError for one that is not expected now."""
        number = message.get("number")
        if type(number) is not int:
            raise WrongReplyError(f"sent {_shorten(message)}, which is not a reply to a question")
        self.has_repeated = number == self._last_number
        if number not in self._asked or (self.answers_in_order and number != next(iter(self._asked))):
            raise WrongReplyError(f"sent a reply that is not expected, {_shorten(message)}")
        read, on_answer = self._asked[number]
        try:
            answer = read(message)
        except Exception as error:  # of any type, by what was sent
            raise WrongReplyError(f"sent {_shorten(message)}, which is not a reply: {error}") from None
        self._last_number = number
        del self._asked[number]
        on_answer(answer)

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield and remove the complete messages that were received; raise WrongReplyError for other bytes."""
        while self._received and not self.is_lost:
            head, length = self._received[: HEAD.size], 0
            if len(head) == HEAD.size:
                _, length = HEAD.unpack(head)
            if not head.startswith(MARK[: len(head)]) or length > MAX_REPLY_BYTES:
                raise _wrong_reply(self._received)
            if len(self._received) < HEAD.size + length or len(head) < HEAD.size:
                return
            contents = bytes(self._received[HEAD.size : HEAD.size + length])
            del self._received[: HEAD.size + length]
            try:
                message = json.loads(contents)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise _wrong_reply(contents)
            yield message


def _end_of(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"  # real-time signals have no names


def _make_temporary(kind: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=f"hybridflow-{kind}-")
    except OSError as error:
        raise RewardError(
            f"the temporary directory of a process ({kind}) cannot be made: {error}; free space there, or set TMPDIR "
            "to a directory that is writable."
        ) from error


def _wrong_reply(contents: bytes | bytearray) -> WrongReplyError:
    return WrongReplyError(f"wrote {bytes(contents[:40])!r}, which is not a reply, to its connection to the run")


def _shorten(message: Mapping[str, Any]) -> str:
    try:
        text = repr(message)
    except RecursionError:
        return "a message that is nested too deeply"
    return text if len(text) <= 200 else f"{text[:200]}..."
