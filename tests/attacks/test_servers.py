"""Hostile HTTP servers behind the reward and the judge, one line each: what a server sends, and what the error says."""

import os
import re
import socketserver
import threading
import time
from contextlib import suppress

import pytest

from hybridflow.environments.rewards import RewardScorer, http_reward, judge_reward
from hybridflow.errors import RewardError

LONGEST_LINE = 1500
"""Characters of an error's first line, whatever the server sends."""


@pytest.fixture(scope="module")
def server():
    """Start a server that reads a request, sends `parts`, with a pause after each, and closes the connection."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            length = 0
            while line := self.rfile.readline().strip().lower():
                length = int(line.partition(b":")[2]) if line.startswith(b"content-length:") else length
            self.rfile.read(length)
            with suppress(OSError):  # the client has closed the connection
                for part in started.parts:  # type: ignore[attr-defined]
                    self.wfile.write(part if isinstance(part, bytes) else part.encode())
                    time.sleep(started.pause_s)  # type: ignore[attr-defined]

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as started:
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def endless(head, part):
    """Return a head and more parts than a client may accept; it closes the connection before."""
    return [head, *[part] * 10_000]


OK = "HTTP/1.1 200 OK\r\n"
CHUNKED = f"{OK}Transfer-Encoding: chunked\r\n\r\n"
BROKEN = r"POST http://127\.0\.0\.1:\d+/v1 failed after 1 attempt, RemoteProtocolError"
LATE = r"failed after 1 attempt, no complete reply within 0\.3 s"
LARGE = r"failed after 1 attempt, the reply is larger than 1048576 bytes"

SENT = [
    # name, what the server sends before it closes, what the error says
    ("zeros", [bytes(1000)], BROKEN),
    ("a status of 999", ["HTTP/1.1 999 What\r\nContent-Length: 3\r\n\r\n1.0"], r"status 999"),
    ("less than its length", [f"{OK}Content-Length: 100\r\n\r\n1.0"], BROKEN),
    ("a chunk of no number", [f"{CHUNKED}xyz\r\n1.0\r\n"], BROKEN),
    ("a header of 1 MB", [f"{OK}X: {'a' * 2**20}\r\n\r\n1.0"], BROKEN),
    ("a switch of protocols", ["HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"], r"failed after 1 attempt"),
    ("302 to no address", ["HTTP/1.1 302 F\r\nContent-Length: 0\r\nLocation: http://[\r\n\r\n"], r"a redirect to"),
    ("an endless header", endless(f"{OK}X: ", "a" * 1000), BROKEN),
    ("endless interim replies", endless("", "HTTP/1.1 100 Continue\r\n\r\n" * 100), rf"{LATE}|{BROKEN}"),
    ("endless chunks", endless(CHUNKED, f"3e8\r\n{'1,' * 500}\r\n"), LARGE),
    ("an endless body of an error", endless("HTTP/1.1 400 Bad\r\n\r\n", "x" * 1000), r"status 400: 'x{200}'"),
    ("a header now and then", endless(OK, "X: a\r\n"), LATE),
    ("a byte of the body now and then", endless(f"{OK}Content-Length: 9999\r\n\r\n", "1"), LATE),
]


def error_of(function, server, **kwargs):
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    kwargs = {"url": url, "retries": 0, "request_timeout_s": 20.0} | kwargs
    with pytest.raises(RewardError) as error:
        RewardScorer(function, kwargs=kwargs).score(["a"], ["d"], [None])
    first = str(error.value).splitlines()[0]
    assert len(first) <= LONGEST_LINE
    assert "The sample:" in first
    return first


@pytest.mark.parametrize(("name", "parts", "message"), SENT, ids=[case[0] for case in SENT])
def test_a_bad_endless_or_slow_reply_is_one_error(server, monkeypatch, name, parts, message):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server.parts, server.pause_s = parts, 0.02 * name.endswith("now and then")
    error = error_of(http_reward, server, request_timeout_s=0.3 if LATE in message else 100.0)
    assert re.search(message, error), error


def test_a_pipe_for_a_prompt_is_one_error(server, tmp_path):
    os.mkfifo(tmp_path / "prompt.txt")
    error = error_of(judge_reward, server, model="m", prompt_file=str(tmp_path / "prompt.txt"))
    assert "is a FIFO, not a regular file" in error
