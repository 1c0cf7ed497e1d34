"""Hostile HTTP servers behind the reward and the judge, one line each: what a server sends, and what the error says."""

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import RewardScorer, http_reward, judge_reward

pytestmark = pytest.mark.slow

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
LATE = r"failed after 1 attempt, no complete reply within 0\.5 s"
LARGE = r"failed after 1 attempt, the reply is larger than 1048576 bytes"

SENT = [
    # name, what the server sends before it closes, what the error says
    ("nothing", b"", BROKEN),
    ("one byte", b"H", BROKEN),
    ("text", b"hello\r\n\r\n", BROKEN),
    ("zeros", bytes(1000), BROKEN),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", BROKEN),
    ("HTTP/0.9", b"<html>1.0</html>", BROKEN),
    ("HTTP/2", b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", BROKEN),
    ("a status of letters", b"HTTP/1.1 abc OK\r\n\r\n", BROKEN),
    ("a status of 999", reply("1.0", status="999 What"), r"status 999"),
    ("only a status line", OK.encode(), BROKEN),
    ("a header without a colon", f"{OK}broken\r\n\r\n1.0".encode(), BROKEN),
    ("a header with a NUL", f"{OK}X: a\0b\r\n\r\n1.0".encode(), BROKEN),
    ("a negative length", f"{OK}Content-Length: -1\r\n\r\n1.0".encode(), BROKEN),
    ("a length of letters", f"{OK}Content-Length: ten\r\n\r\n1.0".encode(), BROKEN),
    ("two lengths", f"{OK}Content-Length: 3\r\nContent-Length: 4\r\n\r\n1.0".encode(), BROKEN),
    ("less than its length", f"{OK}Content-Length: 100\r\n\r\n1.0".encode(), BROKEN),
    ("an unknown transfer encoding", f"{OK}Transfer-Encoding: magic\r\n\r\n1.0".encode(), BROKEN),
    ("a chunk of no number", f"{OK}Transfer-Encoding: chunked\r\n\r\nxyz\r\n1.0\r\n".encode(), BROKEN),
    ("a chunk of 2**64 bytes", f"{OK}Transfer-Encoding: chunked\r\n\r\n{'f' * 17}\r\n1.0".encode(), BROKEN),
    ("chunks that end early", f"{OK}Transfer-Encoding: chunked\r\n\r\n3\r\n1.0\r\n".encode(), BROKEN),
    ("a header of 1 MB", f"{OK}X: {'a' * 2**20}\r\n\r\n1.0".encode(), BROKEN),
    ("a switch of protocols", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", r"failed after 1 attempt"),
    ("no body", reply(""), r"status 200, but the reply is not JSON"),
    ("204", b"HTTP/1.1 204 No Content\r\n\r\n", r"status 204, but the reply is not JSON"),
    (
        "a page",
        reply("<html>hello</html>", headers="Content-Type: text/html\r\n"),
        r"the reply is not JSON: '<html>hello",
    ),
    ("JSON and more", reply("1.0 2.0"), r"the reply is not JSON: '1\.0 2\.0'"),
    ("JSON cut off", reply('{"score": 1.'), r"the reply is not JSON"),
    ("not UTF-8", reply(b'"\xff\xfe'), r"the reply is not JSON"),
    ("compressed", reply(b"\x1f\x8b\x08" + bytes(9), headers="Content-Encoding: gzip\r\n"), r"the reply is not JSON"),
    ("deep nesting", reply("[" * 10**6), r"the reply is not JSON: '\[\[\["),
    ("an integer of 5,000 digits", reply("9" * 5000), r"the reply is not JSON: '9999"),
    ("NaN", reply("NaN"), r"the reply is not JSON: 'NaN'"),
    ("a score of NaN", reply('{"score": NaN}'), r"the reply is not JSON"),
    (
        "infinity by its exponent",
        reply('{"score": 1e999}'),
        r"the scorer replied {'score': inf}; it must reply with a fi",
    ),
    ("an integer beyond float", reply('{"score": ' + "9" * 400 + "}"), r"the scorer replied {'score': 9999"),
    ("a number beyond float32", reply("1e39"), r"returned 1e\+39, which is not a finite number"),
    ("a text", reply('"1.0"'), r"the scorer replied '1\.0'; it must reply with a finite number, or an object"),
    ("null", reply("null"), r"the scorer replied None; it must reply"),
    ("a list", reply("[1.0]"), r"the scorer replied \[1\.0\]; it must reply"),
    ("an empty object", reply("{}"), r"the scorer replied {}; it must reply"),
    ("a score of text", reply('{"score": "1"}'), r"the scorer replied {'score': '1'}; it must reply"),
    ("a score of null", reply('{"score": null}'), r"the scorer replied {'score': None}; it must reply"),
    (
        "infinity beside the score",
        reply('{"score": 1, "x": -1e999}'),
        r"the scorer replied {'score': 1, 'x': -inf}; it mu",
    ),
    ("a long wrong reply", reply(json.dumps(["x" * 10**6])), r"the scorer replied \['xxx"),
    (
        "301",
        reply("", status="301 Moved", headers="Location: http://evil/\r\n"),
        r"status 301, a redirect to http://evil/",
    ),
    (
        "307 to itself",
        reply("", status="307 T", headers="Location: /v1\r\n"),
        r"status 307, a redirect to .*set url to the",
    ),
    ("302 to no address", reply("", status="302 F", headers="Location: http://[\r\n"), r"status 302, a redirect to"),
    ("302 without an address", reply("", status="302 F"), r"status 302, a redirect to"),
    (
        "302 to a file",
        reply("", status="302 F", headers="Location: file:///etc/passwd\r\n"),
        r"status 302, a redirect to",
    ),
    ("401", reply("no", status="401 U"), r"status 401: 'no'\. Set api_key_env"),
    ("404 with a long page", reply("x" * 10**5, status="404 N"), r"status 404: 'x{200}'\. Check the url"),
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
    ("a status line", endless("HTTP/1.1 200 ", "a" * 1000), BROKEN),
    ("interim replies", endless("", "HTTP/1.1 100 Continue\r\n\r\n" * 100), rf"{LATE}|{BROKEN}"),
    ("a body without length", endless(f"{OK}\r\n[", "1," * 500), LARGE),
    ("a body of 2**60 bytes", endless(f"{OK}Content-Length: {2**60}\r\n\r\n[", "1," * 500), LARGE),
    ("chunks", endless(f"{OK}Transfer-Encoding: chunked\r\n\r\n", f"3e8\r\n{'1,' * 500}\r\n"), LARGE),
    ("a body of an error", endless("HTTP/1.1 400 Bad\r\n\r\n", "x" * 1000), r"status 400: 'x{200}'"),
]

SLOW = [
    # name, sender, what the error says
    ("never", endless("", ""), LATE),
    ("a byte of the status now and then", endless("", "H"), LATE),
    ("a header now and then", endless(OK, "X: a\r\n"), LATE),
    ("a byte of the body now and then", endless(f"{OK}Content-Length: 9999\r\n\r\n", "1"), LATE),
    ("a chunk now and then", endless(f"{OK}Transfer-Encoding: chunked\r\n\r\n", "1\r\n1\r\n"), LATE),
]


def chat(content, **choice):
    return json.dumps({"choices": [{"message": {"content": content}, **choice}]})


JUDGED = [
    # name, the judge's reply, what the error says
    ("a number", "5", r"judge 'm' did not reply with a chat completion; check url and model"),
    ("null", "null", r"did not reply with a chat completion"),
    ("no choice", '{"choices": []}', r"did not reply with a chat completion"),
    ("choices of null", '{"choices": null}', r"did not reply with a chat completion"),
    ("choices of texts", '{"choices": ["Score: 5"]}', r"did not reply with a chat completion"),
    ("a table of choices", '{"choices": {"0": {}}}', r"did not reply with a chat completion"),
    ("a message of null", '{"choices": [{"message": null}]}', r"did not reply with a chat completion"),
    ("a message of text", '{"choices": [{"message": "Score: 5"}]}', r"did not reply with a chat completion"),
    ("an error object", '{"error": {"message": "overloaded"}}', r"did not reply with a chat completion.*overloaded"),
    ("content of null", chat(None), r"replied without a text"),
    ("content of a number", chat(5), r"replied without a text"),
    ("content of odd parts", chat([None, 5, {"text": 5}]), r"replied without a text"),
    ("no score", chat("Well done."), r"must end its reply with a line 'Score: <number>'"),
    ("a score of NaN", chat("Score: nan"), r"must end its reply with a line"),
    ("a score of infinity", chat("Score: inf"), r"must end its reply with a line"),
    ("a score with an exponent", chat("Score: 1e1"), r"must end its reply with a line"),
    (
        "a score of 500 digits",
        chat("Score: " + "9" * 500),
        r"gave inf, which is not within lowest=0\.0 and highest=10\.0",
    ),
    ("a score out of range", chat("Score: 11"), r"gave 11\.0, which is not within"),
    ("a negative score", chat("Score: -1"), r"gave -1\.0, which is not within"),
    ("another scale", chat("Score: 5/7"), r"must end its reply with a line"),
    ("cut off", chat("Score: 5", finish_reason="length"), r"was cut off by max_tokens=512"),
    ("a long text without a score", chat("x" * 10**5), r"must end its reply with a line .*'x{200}'"),
    ("many lines of score", chat("Score: x\n" * 10**4), r"must end its reply with a line"),
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


@pytest.mark.parametrize(("sent", "message"), [case[1:] for case in SENT], ids=ids(SENT))
def test_a_bad_reply_is_one_error(server, sent, message):
    server.parts, server.keeps_open, server.pause_s = (lambda: iter([sent])), False, 0.0
    error = error_of(http_reward, server)
    assert re.search(message, error), error


@pytest.mark.parametrize(("parts", "message"), [case[1:] for case in ENDLESS], ids=ids(ENDLESS))
def test_an_endless_reply_is_one_error(server, parts, message):
    server.parts, server.keeps_open, server.pause_s = parts, False, 0.0
    timeout_s = 0.5 if LATE in message else 20.0
    error = error_of(http_reward, server, request_timeout_s=timeout_s)
    assert re.search(message, error), error


@pytest.mark.parametrize(("parts", "message"), [case[1:] for case in SLOW], ids=ids(SLOW))
def test_a_slow_reply_is_one_error(server, parts, message):
    server.parts, server.keeps_open, server.pause_s = parts, True, 0.02
    error = error_of(http_reward, server, request_timeout_s=0.5)
    assert re.search(message, error), error


@pytest.mark.parametrize(("sent", "message"), [case[1:] for case in JUDGED], ids=ids(JUDGED))
def test_a_bad_judgement_is_one_error(server, sent, message):
    server.parts, server.keeps_open, server.pause_s = (lambda: iter([reply(sent)])), False, 0.0
    error = error_of(judge_reward, server, model="m")
    assert re.search(message, error), error


@pytest.mark.parametrize(
    "url", ["", "x", "ftp://h/", "http://", "http://h:99999/", "http://[::1", "http://h\0/", "file:///x"]
)
def test_a_bad_address_is_one_error(server, url):
    assert re.search(r"url=.* must be an http or https address", error_of(http_reward, server, url=url))


def test_a_closed_port_is_one_error(server):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    error = error_of(http_reward, server, url=f"http://127.0.0.1:{port}/")
    assert re.search(r"failed after 1 attempt, ConnectError.*Check that the server runs", error), error


def test_a_pipe_for_a_prompt_is_one_error(server, tmp_path):
    os.mkfifo(tmp_path / "prompt.txt")
    error = error_of(judge_reward, server, model="m", prompt_file=str(tmp_path / "prompt.txt"))
    assert "is not a file" in error
