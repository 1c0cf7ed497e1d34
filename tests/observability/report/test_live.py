import http.client
import json
import socket
import threading

import pytest

from fixtures.report_runs import write_run
from hybridflow.observability.report import live
from hybridflow.observability.report.live import LOOPBACK, LiveServer


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=2)


@pytest.fixture
def ask(run):
    """Return a function that asks a server of the run, and returns status, headers and text."""
    server = LiveServer([run], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def ask(path="/", **headers):
        connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=30)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    yield ask
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_page_is_served_and_may_ask_its_server_only(ask):
    status, headers, text = ask()
    assert status == 200
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert 'data-live="true"' in text
    assert "connect-src 'self'" in text


def test_data_are_sent_again_only_if_a_file_changed(ask, run):
    status, headers, text = ask("/data.json")
    assert (status, json.loads(text)["runs"][0]["curves"]["steps"]) == (200, [1, 2])
    assert ask("/data.json", **{"If-None-Match": headers["ETag"]})[0] == 304
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "critic/score/mean": 1.0}\n')
    status, _, text = ask("/data.json", **{"If-None-Match": headers["ETag"]})
    assert (status, json.loads(text)["runs"][0]["curves"]["steps"]) == (200, [1, 2, 3])


def test_a_page_under_another_name_is_refused(ask):
    assert ask("/data.json", Host="evil.example")[0] == 403
    assert ask("/data.json", Host="evil.example:80")[0] == 403
    assert ask("/data.json", Host="localhost:1")[0] == 200


def test_only_the_page_and_its_data_are_served(ask):
    for path in ("/run.json", "/../run.json", "//etc/passwd", "/data.json/", "/%2e%2e/run.json"):
        assert ask(path)[0] == 404
    assert ask("/?a=b")[0] == 200


def test_a_damaged_file_is_reported_and_the_server_goes_on(ask, run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("[]\n")
    status, _, problem = ask("/data.json")
    assert status == 409
    assert "metrics.jsonl, line 1" in problem
    (run / "metrics.jsonl").write_text(text)
    assert ask("/data.json")[0] == 200


def test_a_file_that_cannot_be_read_is_reported(ask, run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    for path in ("/data.json", "/"):
        status, _, problem = ask(path)
        assert (status, "metrics.jsonl" in problem) == (409, True)


def test_an_error_of_the_page_is_an_answer_and_is_logged(ask, monkeypatch, caplog):
    monkeypatch.setattr(live, "page_data", lambda runs: 1 / 0)
    status, _, problem = ask("/data.json")
    assert (status, problem) == (500, "ZeroDivisionError('division by zero'); hybridflow watch has printed more")
    assert "Traceback" in caplog.text


def test_a_connection_that_asks_nothing_is_closed(run, monkeypatch):
    monkeypatch.setattr(live._Handler, "timeout", 0.2)
    with LiveServer([run], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with socket.create_connection((LOOPBACK, server.server_port), timeout=30) as connection:
                assert connection.recv(1) == b""
        finally:
            server.shutdown()
            thread.join()


def test_the_server_listens_on_loopback_only(run):
    with LiveServer([run], 0) as server:
        assert server.server_address[0] == LOOPBACK
        assert server.address == f"http://127.0.0.1:{server.server_port}/"
