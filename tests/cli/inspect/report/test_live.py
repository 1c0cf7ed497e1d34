import http.client
import json
import os
import socket
from threading import BoundedSemaphore
from types import SimpleNamespace

import pytest

from fixtures.report_runs import served, write_run
from hybridflow.cli.inspect.report import live
from hybridflow.cli.inspect.report.live import LOOPBACK


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=2)


@pytest.fixture
def server(run):
    with served(run) as server:
        yield server


@pytest.fixture
def ask(server):
    """Return a function that asks the server, and returns status, headers and text."""

    def ask(path="/", **headers):
        connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=30)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    return ask


def test_only_the_page_and_its_data_are_served_on_loopback(ask, server):
    assert server.server_address[0] == LOOPBACK
    assert server.address == f"http://127.0.0.1:{server.server_port}/"
    status, headers, text = ask("/?a=b")
    assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert 'data-live="true"' in text
    assert "connect-src 'self'" in text
    for path in ("/run.json", "/../run.json", "//etc/passwd", "/data.json/", "/%2e%2e/run.json"):
        assert ask(path)[0] == 404
    for host, status in (("evil.example", 403), ("evil.example:80", 403), ("localhost:1", 200)):
        assert ask("/data.json", Host=host)[0] == status


def test_data_are_sent_again_only_if_a_file_changed(ask, run):
    status, headers, text = ask("/data.json")
    assert (status, json.loads(text)["runs"][0]["curves"]["steps"]) == (200, [1, 2])
    assert ask("/data.json", **{"If-None-Match": headers["ETag"]})[0] == 304
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "critic/score/mean": 1.0}\n')
    status, _, text = ask("/data.json", **{"If-None-Match": headers["ETag"]})
    assert (status, json.loads(text)["runs"][0]["curves"]["steps"]) == (200, [1, 2, 3])


def test_errors_are_answers_and_the_server_goes_on(ask, run, monkeypatch, caplog):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("[]\n")
    status, _, problem = ask("/data.json")
    assert (status, "metrics.jsonl, line 1" in problem) == (409, True)
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    for path in ("/data.json", "/"):
        status, _, problem = ask(path)
        assert (status, "metrics.jsonl" in problem) == (409, True)
    (run / "metrics.jsonl").rmdir()
    (run / "metrics.jsonl").write_text(text)
    assert ask("/data.json")[0] == 200
    monkeypatch.setattr(live, "page_data", lambda runs: 1 / 0)
    (run / "metrics.jsonl").write_text(text + text)
    status, _, problem = ask("/data.json")
    assert (status, problem) == (500, "ZeroDivisionError('division by zero'); hybridflow watch has printed more")
    assert "Traceback" in caplog.text


def test_a_connection_that_asks_nothing_is_closed(monkeypatch, server):
    monkeypatch.setattr(live._Handler, "timeout", 0.2)
    with socket.create_connection((LOOPBACK, server.server_port), timeout=30) as connection:
        assert connection.recv(1) == b""


def test_a_browser_that_leaves_is_no_error(server, caplog):
    for error, is_logged in ((BrokenPipeError(), False), (TimeoutError(), False), (ValueError("a bug"), True)):
        try:
            raise error
        except (OSError, ValueError):
            server.handle_error(None, None)
        assert bool(caplog.records) == is_logged


def test_more_connections_than_there_are_places_are_closed(ask, server):
    server._places = BoundedSemaphore(1)
    place = LOOPBACK, server.server_port
    with socket.create_connection(place, timeout=30), socket.create_connection(place, timeout=30) as second:
        assert second.recv(1) == b""
    assert server._places.acquire(timeout=30)
    server._places.release()
    assert ask()[0] == 200


def test_without_a_file_for_a_connection_the_server_pauses(server, monkeypatch):
    pauses = []
    monkeypatch.setattr(live, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(server, "socket", SimpleNamespace(accept=lambda: os.open("/", os.O_WRONLY)))
    with pytest.raises(OSError, match="Is a directory"):
        server.get_request()
    assert pauses == [live.PAUSE_S]
    monkeypatch.undo()
