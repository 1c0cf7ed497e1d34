"""A process of user code and the non-blocking exchange of frames with it; knows nothing of samples."""

import json
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridflow.environments.processes.reward_process import HEAD, MARK, MAX_REPLY_BYTES
from hybridflow.environments.processes.tree_removal import remove_tree
from hybridflow.errors import RewardError

logger = logging.getLogger(__name__)

PROGRAM = Path(__file__).with_name("reward_process.py")

KILL_TIMEOUT_S = 60.0
"""Seconds that a supervisor may take to end its processes before it is killed itself."""

_SHOWN_BYTES = 40


class WrongReplyError(Exception):
    """Bytes on the connection that are not a reply of reward_process.py."""


class FramedProcess:
    """A supervised process in a separate session; `kill` ends it with all processes that it has started.

    Its temporary directory (TMPDIR) is its own. The supervisor removes it, also if this process is killed; so does
    `kill`, also if the supervisor was killed.
    """

    def __init__(self, settings: str, program: Path = PROGRAM, kind: str = "reward") -> None:
        self._temporary, self._kind = _make_temporary(kind), kind
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, str(program), settings],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
                env={**os.environ, "TMPDIR": self._temporary},
            )
        self.connection.setblocking(False)  # a function that hangs stops reading
        self._to_send, self._received = bytearray(), bytearray()

    @property
    def events(self) -> int:
        """Events to select the connection for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_send else 0)

    def put(self, value: Any) -> None:
        """Append a frame with the pickled value to the send buffer."""
        contents = pickle.dumps(value)
        self._to_send += HEAD.pack(MARK, len(contents)) + contents

    def send(self) -> None:
        """Send as much of the buffer as the connection accepts."""
        with suppress(OSError):  # `receive` detects that the process has exited
            while self._to_send:
                del self._to_send[: self.connection.send(self._to_send)]

    def receive(self) -> bool:
        """Receive available bytes; return False at the end of the stream."""
        chunk = b""
        with suppress(ConnectionResetError):  # it exited with unread samples
            chunk = self.connection.recv(1 << 16)
        self._received += chunk
        return bool(chunk)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield and remove the complete messages in the receive buffer; raise WrongReplyError for other bytes."""
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

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        self.popen.terminate()
        self.popen.send_signal(signal.SIGCONT)  # the function may have stopped it
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

    def end(self) -> str:
        """Return how the process exited; wait for it first."""
        status = self.popen.returncode
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"


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
