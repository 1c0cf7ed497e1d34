"""Runners of a file of reward functions, and a local HTTP server with answers that a test defines."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridflow.environments.rewards import RewardRunner, http_client


@pytest.fixture
def file(request, tmp_path) -> Path:
    """Write `FUNCTIONS` of the test's module to a file."""
    path = tmp_path / "mine.py"
    path.write_text(getattr(request.module, "FUNCTIONS", ""))
    return path


@pytest.fixture
def runner(file) -> Iterator[Callable[..., RewardRunner]]:
    """Yield `runner(function, **settings)`, which starts processes with a function of the file; they are closed."""
    built: list[RewardRunner] = []

    def build(function: str = "score", **changes: Any) -> RewardRunner:
        settings = {"num_processes": 1, "timeout_s": 200.0, "memory_bytes": 2**29} | changes
        built.append(RewardRunner(f"{file}:{function}", **settings))
        return built[-1]

    yield build
    for each in built:
        each.close()


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    json: Any
    client_port: int
    """One for each connection."""


Answer = Callable[[Request], Any]
"""(status, headers, body) or a value that is sent as JSON; None closes the connection."""


@dataclass
class Server:
    url: str
    answer: Answer
    requests: list[Request] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def num_connections(self) -> int:
        return len({request.client_port for request in self.requests})

    def answer_in_turn(self, *answers: Any) -> None:
        """Answer the first request with the first answer, and so on; repeat the last answer."""
        self.answer = lambda request: answers[min(len(self.requests), len(answers)) - 1]

    def hang(self, request: Request) -> None:
        self.is_over.wait()


class _ManyAtOnce(ThreadingHTTPServer):
    request_queue_size = 256


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    """Start a server that answers 1.0 by default, with short pauses between attempts."""
    monkeypatch.setattr(http_client, "BACKOFF_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            contents = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = Request(self.path, dict(self.headers), contents, self.client_address[1])
            served.requests.append(request)
            answer = served.answer(request)
            if answer is None:
                self.close_connection = True
                return
            if not isinstance(answer, tuple):
                answer = 200, {"Content-Type": "application/json"}, json.dumps(answer)
            status, headers, body = answer
            body = body.encode() if isinstance(body, str) else body
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True  # the client closed the connection

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listening = _ManyAtOnce(("127.0.0.1", 0), Handler)
    served = Server(f"http://127.0.0.1:{listening.server_address[1]}/score", lambda request: 1.0)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.is_over.set()
    listening.shutdown()
    listening.server_close()
    thread.join()
