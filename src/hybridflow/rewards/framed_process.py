"""Starts a process of reward_process.py and exchanges frames with it without waiting; does not know of samples."""

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
    """A process in a session of its own; `kill` ends it with the processes that it has started."""

    def __init__(self, settings: str) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, str(PROGRAM), settings],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        self.connection.setblocking(False)  # a function that hangs reads nothing more
        self._to_send, self._received = bytearray(), bytearray()

    @property
    def events(self) -> int:
        """What to select the connection for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_send else 0)

    def put(self, value: Any) -> None:
        """Append a frame to what is to be sent."""
        contents = pickle.dumps(value)
        self._to_send += LENGTH.pack(len(contents)) + contents

    def send(self) -> None:
        """Send as much as the connection takes."""
        with suppress(OSError):  # that the process has ended is found by `receive`
            while self._to_send:
                del self._to_send[: self.connection.send(self._to_send)]

    def receive(self) -> bool:
        """Receive some of what has come; False at the end."""
        chunk = b""
        with suppress(ConnectionResetError):  # it has ended with samples that it had not read
            chunk = self.connection.recv(1 << 16)
        self._received += chunk
        return bool(chunk)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Take the whole messages out of what was received."""
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            contents = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            yield json.loads(contents)

    def kill(self) -> None:
        """Kill the process and what is in its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.kill()
        self.popen.wait()
        self.connection.close()

    def end(self) -> str:
        """Return how a process that was waited for has ended."""
        status = self.popen.returncode
        if status is not None and status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"
