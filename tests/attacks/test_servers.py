"""Hostile HTTP servers behind the reward and the judge, one line each: what a server sends, and what the error says."""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import RewardScorer, http_reward, judge_reward

LONGEST_LINE = 1500
"""Characters of an error's first line, whatever the server sends."""

FOREVER = 10_000
"""More parts than a client may accept; it closes the connection before."""


def reply(body, *, status="200 OK", headers=""):
    """Return a whole reply."""
    body = body if isinstance(body, bytes) else body.encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def raw(text):
    return text.encode() if isinstance(text, str) else text


class Server:
    """A server that reads a request, sends the parts that it was given, and then closes or keeps the connection."""

    def __init__(self) -> None:
        self.parts: Callable[[], Iterator[bytes]] = lambda: iter(())
        self.keeps_open = False
        self.pause_s = 0.0
        self._over = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        with suppress(OSError):  # wakes `accept`
            socket.create_connection(self._listening.getsockname()).close()
        self._thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection, suppress(OSError):
                if self._over.is_set():
                    return
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(30)
        request = b""
        while b"\r\n\r\n" not in request:
            request += connection.recv(2**16)
        head, _, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        while length and len(body) < int(length[1]):
            body += connection.recv(2**16)
        for part in self.parts():
            connection.sendall(part)
            if self.pause_s and self._over.wait(self.pause_s):
                return
        if self.keeps_open:
            connection.recv(1)  # until the client closes


@pytest.fixture(scope="module")
def server():
    started = Server()
    yield started
    started.close()


def endless(head, part):
    """Return a sender of a head, and of a part over and over."""

    def parts():
        yield raw(head)
        for _ in range(FOREVER):
            yield raw(part)

    return parts


OK = "HTTP/1.1 200 OK\r\n"
BROKEN = r"POST http://127\.0\.0\.1:\d+/v1 failed after 1 attempt, RemoteProtocolError"
LATE = r"failed after 1 attempt, no complete reply within 0\.3 s"
LARGE = r"failed after 1 attempt, the reply is larger than 1048576 bytes"

SENT = [
    # name, what the server sends before it closes, what the error says
    ("nothing", b"", BROKEN),
    ("zeros", bytes(1000), BROKEN),
    ("a status of 999", reply("1.0", status="999 What"), r"status 999"),
    ("a header without a colon", f"{OK}broken\r\n\r\n1.0".encode(), BROKEN),
    ("less than its length", f"{OK}Content-Length: 100\r\n\r\n1.0".encode(), BROKEN),
    ("a chunk of no number", f"{OK}Transfer-Encoding: chunked\r\n\r\nxyz\r\n1.0\r\n".encode(), BROKEN),
    ("chunks that end early", f"{OK}Transfer-Encoding: chunked\r\n\r\n3\r\n1.0\r\n".encode(), BROKEN),
    ("a header of 1 MB", f"{OK}X: {'a' * 2**20}\r\n\r\n1.0".encode(), BROKEN),
    ("a switch of protocols", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", r"failed after 1 attempt"),
    ("deep nesting", reply("[" * 10**6), r"the reply is not JSON: '\[\[\["),
    ("infinity by its exponent", reply('{"score": 1e999}'), r"the scorer replied {'score': inf}; it must reply"),
    ("a number beyond float32", reply("1e39"), r"returned 1e\+39, which is not a finite number"),
    ("302 to no address", reply("", status="302 F", headers="Location: http://[\r\n"), r"status 302, a redirect to"),
    (
        "503 for ever",
        reply("", status="503 B", headers="Retry-After: 999999999\r\n"),
        r"status 503\. If the server is over",
    ),
    ("429 with a bad pause", reply("", status="429 B", headers="Retry-After: \x7f\r\n"), r"failed after 1 attempt"),
]

ENDLESS = [
    # name, sender, what the error says
    ("headers", endless(OK, f"X: {'a' * 1000}\r\n"), BROKEN),
    ("a header", endless(f"{OK}X: ", "a" * 1000), BROKEN),
    ("interim replies", endless("", "HTTP/1.1 100 Continue\r\n\r\n" * 100), rf"{LATE}|{BROKEN}"),
    ("a body without length", endless(f"{OK}\r\n[", "1," * 500), LARGE),
    ("chunks", endless(f"{OK}Transfer-Encoding: chunked\r\n\r\n", f"3e8\r\n{'1,' * 500}\r\n"), LARGE),
    ("a body of an error", endless("HTTP/1.1 400 Bad\r\n\r\n", "x" * 1000), r"status 400: 'x{200}'"),
]

SLOW = [
    # name, sender, what the error says
    ("never", endless("", ""), LATE),
    ("a header now and then", endless(OK, "X: a\r\n"), LATE),
    ("a byte of the body now and then", endless(f"{OK}Content-Length: 9999\r\n\r\n", "1"), LATE),
]


def ids(table):
    return [case[0] for case in table]


def error_of(function, server, **kwargs):
    kwargs = {"url": server.url, "retries": 0, "request_timeout_s": 20.0} | kwargs
    with pytest.raises(RewardError) as error:
        RewardScorer(function, kwargs=kwargs).score(["a"], ["d"], [None])
    first = str(error.value).splitlines()[0]
    assert len(first) <= LONGEST_LINE
    assert "The sample:" in first
    return first


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize(("parts", "message"), [case[1:] for case in SENT + ENDLESS], ids=ids(SENT + ENDLESS))
def test_a_bad_or_endless_reply_is_one_error(server, parts, message):
    sent = parts if callable(parts) else lambda: iter([parts])
    server.parts, server.keeps_open, server.pause_s = sent, False, 0.0
    error = error_of(http_reward, server, request_timeout_s=0.3 if LATE in message else 100.0)
    assert re.search(message, error), error


@pytest.mark.parametrize("parts", [case[1] for case in SLOW], ids=ids(SLOW))
def test_a_slow_reply_is_one_error(server, parts):
    server.parts, server.keeps_open, server.pause_s = parts, True, 0.02
    error = error_of(http_reward, server, request_timeout_s=0.3)
    assert re.search(LATE, error), error


def test_a_pipe_for_a_prompt_is_one_error(server, tmp_path):
    os.mkfifo(tmp_path / "prompt.txt")
    error = error_of(judge_reward, server, model="m", prompt_file=str(tmp_path / "prompt.txt"))
    assert "is not a file" in error
