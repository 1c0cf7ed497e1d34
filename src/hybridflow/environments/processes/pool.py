"""Supervised processes of user code on an event loop in a thread: started, asked, timed, killed and replaced.

    question ──pickle──> process of the user's code ──JSON──> future of its answer

What is asked, and which process is asked, is decided by the pools of rewards and of environments. The run never
unpickles what user code has produced.
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
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from hybridflow.environments.processes.reward_process import HEAD, MARK, MAX_REPLY_BYTES
from hybridflow.environments.processes.tree_removal import remove_tree
from hybridflow.errors import HybridFlowError, RewardError

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Seconds for starting a process and importing the user's files, unless a pool allows more."""

MOST_FAILED_STARTS = 2
"""Number of times that a process which ended as it started is started again: it may have been killed from outside."""

WATCH_S = 0.5
"""Interval, in seconds, of checking for a process that exited without closing its connection."""

EXIT_S = 1.0
"""Seconds that a process may take to exit after it has closed its connection."""

KILL_TIMEOUT_S = 60.0
"""Seconds that a supervisor may take to end its processes before it is killed itself."""

END_S = 1.0
"""Seconds that tasks may take to clean up when a pool is closed."""

_SHOWN_BYTES = 40

Reason = Literal["exited", "wrong reply", "late", "ended", "closed"]


class LostError(Exception):
    """A process was lost: the text says what it did, or how it "exited"; "ended" and "closed" are done by the run."""

    def __init__(self, problem: str, reason: Reason) -> None:
        super().__init__(problem)
        self.reason: Reason = reason


class WrongReplyError(Exception):
    """Bytes on the connection that are not a reply of the process's program."""


class UserProcess(ABC):
    """A supervised process in a session of its own, and the questions that it has; used on the event loop.

    Its temporary directory (TMPDIR) is its own. The supervisor removes it, also if this process is killed; so does
    `kill`, which also ends all processes that it has started, even if the supervisor was killed.
    """

    PROGRAM: ClassVar[str]
    """File beside this one."""
    KIND: ClassVar[str]
    LOAD_ERROR: ClassVar[type[HybridFlowError]]
    """Raised if the user's code cannot be loaded."""

    def __init__(self, settings: str, start_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._temporary = _make_temporary(self.KIND)
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(self.PROGRAM)), settings],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
                env={**os.environ, "TMPDIR": self._temporary},
            )
        self.connection.setblocking(False)  # user code that hangs stops reading
        self._to_send, self._received = bytearray(), bytearray()
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.lost: asyncio.Future[LostError] = self._loop.create_future()
        self.loaded: Any = None  # what `read_ready` has returned
        self.is_lost = False
        self.answers_in_order = False
        self.has_repeated = False  # whether it has answered its last question again
        self._asked: dict[int, asyncio.Future[Any]] = {}  # by number, the oldest first
        self._numbers = itertools.count()
        self._last_number: int | None = None
        self._kill_lock, self.is_killed = threading.RLock(), False
        self._killing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self.connection, self._read)
        self._watcher = self._loop.call_later(WATCH_S, self._watch)
        self.set_time_limit(start_timeout_s)

    @abstractmethod
    def read_ready(self, message: Mapping[str, Any]) -> Any:
        """Return what the process says of the code that it has loaded. Raises ValueError for another message."""

    @abstractmethod
    def read_answer(self, message: Mapping[str, Any]) -> Any:
        """Return the answer in a message. Raises ValueError for another message."""

    def put(self, value: Any) -> None:
        """Send a frame with the pickled value."""
        contents = pickle.dumps(value)
        is_sending = bool(self._to_send)
        self._to_send += HEAD.pack(MARK, len(contents)) + contents
        if not is_sending:
            self._send()

    def ask(self, *question: Any) -> asyncio.Future[Any]:
        """Send a question; return the future of its answer, or of a LostError. Raises LostError if it is lost."""
        if self.is_lost:
            raise LostError("was lost before", "ended")
        number = next(self._numbers)
        answer = self._asked[number] = self._loop.create_future()
        self.put((number, *question))
        return answer

    def set_time_limit(self, seconds: float | None, problem: str = "") -> None:
        """Lose the process in so many seconds, in place of the limit before; None: there is no limit."""
        if self._timer:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.lose, problem, "late")

    def handle(self, message: Mapping[str, Any]) -> None:
        """Note what a message says. Raises WrongReplyError for one that is not expected now."""
        if not self.ready.done():
            if isinstance(message.get("not_loaded"), str):
                self.ready.set_exception(self.LOAD_ERROR(message["not_loaded"]))
                self.lose("was not loaded", "ended")
                return
            try:
                self.loaded = self.read_ready(message)
            except (ValueError, KeyError, TypeError):
                raise WrongReplyError(f"sent {_shorten(message)} while it was imported") from None
            self.set_time_limit(None)
            self.ready.set_result(None)
            return
        number = message.get("number")
        if type(number) is not int:
            raise WrongReplyError(f"sent {_shorten(message)}, which is not a reply to a question")
        self.has_repeated = number == self._last_number
        if number not in self._asked or (self.answers_in_order and number != next(iter(self._asked))):
            raise WrongReplyError(f"sent a reply that is not expected, {_shorten(message)}")
        try:
            answer = self.read_answer(message)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WrongReplyError(f"sent {_shorten(message)}, which is not a reply: {error}") from None
        self._last_number, future = number, self._asked.pop(number)
        if not future.done():  # who asked may have been cancelled
            future.set_result(answer)

    @property
    def is_alive(self) -> bool:
        """Whether the process is not lost and has not exited."""
        return not self.is_lost and self.popen.poll() is None

    @property
    def has_answered(self) -> bool:
        """Whether the process has answered a question."""
        return self._last_number is not None

    def lose(self, problem: str, reason: Reason) -> None:
        """Kill the process, of which nothing is expected any more; then all that wait for it get a LostError."""
        if self.is_lost:
            return
        if reason == "late" and self.popen.poll() is not None:
            reason = "exited"
        self._stop_listening()
        self._killing = self._loop.create_task(self._kill_and_tell(problem, reason))

    async def stop(self, problem: str) -> None:
        """Lose the process, and wait until it is killed."""
        self.lose(problem, "ended")
        await asyncio.shield(self.lost)

    def give_up(self) -> None:
        """Expect nothing of the process any more, since its pool is closed; it is still to be killed."""
        self._stop_listening()
        self._tell(LostError("was closed", "closed"))

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
                    "'%s' of a process (%s) could not be removed (%s); remove it.", self._temporary, self.KIND, error
                )

    async def _kill_and_tell(self, problem: str, reason: Reason) -> None:
        try:
            if reason == "exited":  # its exit status is not to become that of the kill
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self.popen.wait, EXIT_S)
            await asyncio.to_thread(self.kill)
        finally:
            self._tell(LostError(self._end() if reason == "exited" else problem, reason))

    def _tell(self, error: LostError) -> None:
        for future in (self.ready, *self._asked.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # asyncio need not report it, also if nothing waits for it
        if not self.lost.done():
            self.lost.set_result(error)

    def _end(self) -> str:
        """Return how the process has exited."""
        status = self.popen.returncode
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"

    def _stop_listening(self) -> None:
        self.is_lost = True
        self.set_time_limit(None)
        self._watcher.cancel()
        with suppress(OSError, ValueError):  # it was killed
            self._loop.remove_reader(self.connection)
            self._loop.remove_writer(self.connection)

    def _watch(self) -> None:
        if self.popen.poll() is not None:  # a child of it may keep its connection open
            self.lose("", "exited")
            return
        self._watcher = self._loop.call_later(WATCH_S, self._watch)

    def _send(self) -> None:
        """Send as much as the connection accepts, and the rest as soon as it accepts more."""
        try:
            while self._to_send:
                del self._to_send[: self.connection.send(self._to_send)]
        except BlockingIOError:
            self._loop.add_writer(self.connection, self._send)
            return
        except OSError:  # it has exited, which `_read` notices
            self._to_send.clear()
        self._loop.remove_writer(self.connection)

    def _read(self) -> None:
        chunk = b""
        with suppress(ConnectionResetError):  # it exited with unread questions
            try:
                chunk = self.connection.recv(1 << 16)
            except BlockingIOError:
                return
        if not chunk:
            self.lose("", "exited")
            return
        self._received += chunk
        try:
            for message in self._messages():
                self.handle(message)
                if self.is_lost:
                    return
        except WrongReplyError as error:
            self.lose(str(error), "wrong reply")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield and remove the complete messages that were received; raise WrongReplyError for other bytes."""
        while self._received:
            if not self._received.startswith(MARK[: len(self._received)]):
                raise _wrong_reply(self._received)
            if len(self._received) < HEAD.size:
                return
            _, length = HEAD.unpack_from(self._received)
            if length > MAX_REPLY_BYTES:
                raise _wrong_reply(self._received)
            if len(self._received) < HEAD.size + length:
                return
            contents = bytes(self._received[HEAD.size : HEAD.size + length])
            del self._received[: HEAD.size + length]
            try:
                message = json.loads(contents)
            except (ValueError, RecursionError):
                raise _wrong_reply(contents) from None
            if not isinstance(message, dict):
                raise _wrong_reply(contents)
            yield message


P = TypeVar("P", bound=UserProcess)


class ProcessPool(ABC, Generic[P]):
    """An event loop in a thread and processes on it, until `close`, the end of the pool or that of the interpreter.

    What the loop keeps for longer than a start or a question must not refer to the pool, see `weakly`.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._processes: list[P] = []  # that were started and are not killed yet
        # A process ends with the thread that has started it.
        self._thread = threading.Thread(target=_serve, args=[self.loop], name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self.loop, self._thread, self._processes)

    def close(self) -> None:
        """End all processes and the event loop."""
        self._end()

    @abstractmethod
    def _new_process(self) -> P:
        """Start a process."""

    async def _ready_process(self) -> P:
        """Return a new process that is ready. Raises LostError, or the process's LOAD_ERROR."""
        processes = self._processes

        def remove(_: object) -> None:
            processes[:] = [process for process in processes if not process.is_killed]

        for num_failed in itertools.count():
            process = self._new_process()
            processes.append(process)
            process.lost.add_done_callback(remove)
            try:
                await process.ready
                return process
            except LostError as lost:
                if lost.reason != "exited" or num_failed == MOST_FAILED_STARTS:
                    raise
            except BaseException:
                process.lose("was not ready", "ended")
                raise
        raise AssertionError("unreachable")

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine returns on the loop; an interrupt of this thread cancels it."""
        result = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return result.result()
        except BaseException:
            result.cancel()
            raise


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method while its object exists, without keeping it alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if found := reference():
            found(*arguments)

    return call


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, which may be after `_end` if user code blocks it, and close it."""
    try:
        loop.run_forever()
    finally:  # SystemExit of user code in this process ends it
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, processes: list[Any]) -> None:
    """End all, also where the garbage collector calls it: in any thread, which may hold locks that others wait for."""

    async def end() -> None:
        for process in [*processes]:
            process.give_up()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=END_S)
        await asyncio.sleep(0)  # those that wait for processes are told
        loop.stop()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(end(), loop)
    if threading.current_thread() is not thread:
        thread.join(2 * END_S)  # user code in this process may block it
    for process in [*processes]:
        process.kill()  # in this thread, since an interpreter that ends starts no others
    processes.clear()


def _make_temporary(kind: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=f"hybridflow-{kind}-")
    except OSError as error:
        raise RewardError(
            f"the temporary directory of a process ({kind}) cannot be made: {error}; free space there, or set TMPDIR "
            "to a directory that is writable."
        ) from error


def _wrong_reply(contents: bytes | bytearray) -> WrongReplyError:
    return WrongReplyError(
        f"wrote {bytes(contents[:_SHOWN_BYTES])!r}, which is not a reply, to its connection to the run"
    )


def _shorten(message: Mapping[str, Any]) -> str:
    """Return the start of a message's text, for an error."""
    try:
        text = repr(message)
    except RecursionError:
        return "a message that is nested too deeply"
    return text if len(text) <= 200 else f"{text[:200]}..."
