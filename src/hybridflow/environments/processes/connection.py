"""The connection of a process of user code to its run, as the process sees it. Imports only the standard library.

A frame is a mark, a length of 8 bytes and its contents: pickles of (number, *question) as input, the first one of
(0, settings), and JSON with the number as output, because the run must not unpickle what user code has produced.
"""

import asyncio
import json
import os
import pickle
import struct
import threading
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

HEAD = struct.Struct("<4sQ")
MARK = b"hfr\x00"
"""Begins every frame, so that bytes which user code has written to the connection are not taken for a reply."""

MAX_REPLY_BYTES = 2**28


class Replies:
    """The output of the connection. A child that user code has forked exits instead of replying."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._owner = stream, os.getpid()

    def send(self, message: dict[str, Any]) -> None:
        """Write the message as a frame of JSON; in place of one that is too large, write a failure."""
        if os.getpid() != self._owner:
            os._exit(0)
        contents = json.dumps(message).encode()
        if len(contents) > MAX_REPLY_BYTES:
            problem = f"ValueError: the result has {len(contents)} bytes as JSON, more than {MAX_REPLY_BYTES}"
            contents = json.dumps({"error": problem, "kind": "raised", "number": message.get("number")}).encode()
        try:
            self._stream.write(HEAD.pack(MARK, len(contents)) + contents)
            self._stream.flush()
        except BrokenPipeError:  # the rank was killed, and this process exits with it
            os._exit(0)


def receive(stream: BinaryIO) -> Any:
    """Return the next question; None at the end of the stream, also in the middle of a question."""
    try:
        head = stream.read(HEAD.size)
        length = HEAD.unpack(head)[1] if len(head) == HEAD.size else -1
        contents = stream.read(max(0, length))
    except ConnectionResetError:  # the rank was killed before it read a reply
        return None
    return pickle.loads(contents) if len(contents) == length else None


async def serve(answer: Callable[..., Awaitable[dict[str, Any]]], incoming: BinaryIO, replies: Replies) -> None:
    """Answer questions as they arrive, concurrently, until there are no more; the sender decides how many at a time."""
    loop, questions = asyncio.get_running_loop(), asyncio.Queue[Any]()

    def read() -> None:
        while (question := receive(incoming)) is not None:
            loop.call_soon_threadsafe(questions.put_nowait, question)
        loop.call_soon_threadsafe(questions.put_nowait, None)

    async def reply(number: int, *question: Any) -> None:
        replies.send({**await answer(*question), "number": number})

    threading.Thread(target=read, daemon=True).start()
    tasks: set[asyncio.Task[None]] = set()
    while (question := await questions.get()) is not None:
        task = asyncio.create_task(reply(*question))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
