"""Process of reward_process.py and the non-blocking exchange of frames with it; knows nothing of samples."""

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridflow.rewards.reward_process import LENGTH

PROGRAM = Path(__file__).with_name("reward_process.py")


class FramedProcess:
    """A process in a separate session; `kill` ends it together with the processes that it has started."""

    def __init__(self, settings: str) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, str(PROGRAM), settings],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
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
        self._to_send += LENGTH.pack(len(contents)) + contents

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
        """Yield and remove the complete messages in the receive buffer."""
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            contents = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            yield json.loads(contents)

    def kill(self) -> None:
        """Kill the process and its process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.kill()
        self.popen.wait()
        self.connection.close()

    def end(self) -> str:
        """Return how the process exited; wait for it first."""
        status = self.popen.returncode
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"
