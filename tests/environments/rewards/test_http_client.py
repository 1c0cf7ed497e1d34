"""The HTTP client against a real server that fails in many ways."""

import asyncio
import gzip
import random
import socket
import time
from contextlib import asynccontextmanager
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pytest

from hybridflow.environments.rewards import http_client
from hybridflow.environments.rewards.http_client import post_json
from hybridflow.errors import RewardError

BUSY = (503, {}, "try later")


def post(url, payload=None, **changes):
    return asyncio.run(post_once(url, payload, **changes))


async def post_once(url, payload=None, **changes):
    settings = {"retries": 3, "requests_per_second": 0.0, "request_timeout_s": 100.0} | changes
    return await post_json(url, payload or {}, **settings)


def failure(url, payload=None, **changes):
    with pytest.raises(RewardError) as error:
        post(url, payload, **changes)
    return str(error.value)


class Pauses:
    """A clock that only a pause moves; `seconds` lists all pauses that were asked for, also those of length 0."""

    def __init__(self):
        self.now, self.seconds, self.is_stopped = 0.0, [], False

    def time(self):
        return self.now

    async def sleep(self, seconds):
        self.seconds.append(seconds)
        if seconds > 0 and self.is_stopped:
            await asyncio.Event().wait()  # until the task is canceled
        self.now += seconds


@pytest.fixture
def pauses(monkeypatch):
    """Replace the clock and the sleep of the client."""
    replaced = Pauses()
    changed = {"sleep": replaced.sleep, "get_running_loop": lambda: replaced}
    monkeypatch.setattr(http_client, "asyncio", SimpleNamespace(**{**vars(asyncio), **changed}))
    return replaced


def test_json_is_posted_and_the_json_reply_returned(server):
    server.answer = lambda request: {"got": request.json}
    payload = {"text": "é {x} \ud800", "number": np.float32(0.5), "numbers": np.arange(2), "nothing": None}
    got = {"text": "é {x} \ud800", "number": 0.5, "numbers": [0, 1], "nothing": None}
    assert post(server.url, payload) == {"got": got}
    assert server.requests[0].headers["Content-Type"] == "application/json"
    assert "Authorization" not in server.requests[0].headers


def test_only_temporary_statuses_are_retried(server):
    for status in (408, 429, 500, 502, 503, 504):
        server.requests.clear()
        server.answer_in_turn((status, {}, ""), (status, {}, "{}"), 0.5)
        assert post(server.url) == 0.5
        assert len(server.requests) == 3
    for status in (300, 400, 404, 422, 501):
        server.requests.clear()
        server.answer = lambda request, status=status: (status, {}, "no such model")
        message = failure(server.url)
        assert f"POST {server.url} failed after 1 attempt, status {status}" in message
        assert "'no such model'" in message
        assert len(server.requests) == 1


def test_error_after_retries_names_url_status_body_attempts_and_fix(server):
    server.answer = lambda request: (503, {}, "x" * 300)
    assert failure(server.url, retries=2) == (
        f"POST {server.url} failed after 3 attempts, status 503: '{'x' * 200}'. If the server is overloaded, lower "
        "requests_per_second; if it recovers later, raise retries. (retries=2, requests_per_second=0.0, "
        "request_timeout_s=100.0, api_key_env='')"
    )
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("retry_after", "least"),
    [
        ("1", 1.0),
        ("Tue, 01 Jan 2030 00:00:02 GMT", 2.0),
        ("86400", http_client.MAX_RETRY_AFTER_S),
        ("Fri, 31 Dec 9999 23:59:59 GMT", http_client.MAX_RETRY_AFTER_S),
        ("soon", 0.0),
        ("nan", 0.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_respected_up_to_a_bound_if_it_is_valid(server, pauses, monkeypatch, retry_after, least):
    monkeypatch.setattr(http_client, "datetime", SimpleNamespace(now=lambda zone: datetime(2030, 1, 1, tzinfo=zone)))
    server.answer_in_turn((429, {"Retry-After": retry_after}, ""), 1.0)
    assert post(server.url) == 1.0
    (pause,) = pauses.seconds
    assert least <= pause <= least + http_client.BACKOFF_S


def test_pauses_double_up_to_a_bound_and_keep_the_global_random_state(monkeypatch):
    monkeypatch.setattr(http_client, "BACKOFF_S", 1.0)
    before = random.getstate()
    longest = [max(http_client._pause_s(attempt, "") for _ in range(2000)) for attempt in (1, 2, 3, 2000)]
    assert longest == pytest.approx([1.0, 2.0, 4.0, 30.0], rel=0.05)
    assert min(http_client._pause_s(1, "") for _ in range(2000)) < 0.05
    assert random.getstate() == before


def test_a_hanging_server_times_out_and_is_retried(server):
    server.answer = lambda request: server.hang(request) if len(server.requests) == 1 else 1.0
    assert post(server.url, request_timeout_s=0.2, retries=20) == 1.0
    server.answer = server.hang
    assert "failed after 2 attempts, no complete reply within 0.2 s" in failure(
        server.url, retries=1, request_timeout_s=0.2
    )


def test_a_connection_closed_by_the_server_is_retried(server):
    server.answer_in_turn(None, None, 1.0)
    assert post(server.url) == 1.0
    server.answer_in_turn(None)
    message = failure(server.url, retries=1)
    assert "failed after 2 attempts, RemoteProtocolError: 'Server disconnected" in message
    assert "Check that the server runs" in message


def test_error_without_a_server_names_the_connection(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        assert f"POST {url} failed after 2 attempts, ConnectError" in failure(url, retries=1)


@pytest.mark.parametrize("body", ["<html>", "", "NaN", "[" * 100_000, b"\xff\xfe\x00", '{"score": 1'])
def test_a_reply_that_is_not_json_is_an_error_at_once(server, body):
    server.answer = lambda request: (200, {}, body)
    assert "failed after 1 attempt, status 200, but the reply is not JSON" in failure(server.url)


def test_a_reply_above_one_mebibyte_is_not_read_to_the_end(server):
    server.answer = lambda request: (200, {}, '"' + "x" * (2**20 - 2) + '"')
    assert len(post(server.url)) == 2**20 - 2
    server.answer = lambda request: (200, {}, b"1" * 2**26)
    assert "failed after 1 attempt, the reply is larger than 1048576 bytes" in failure(server.url)


def test_a_compressed_reply_is_not_decompressed(server):
    server.answer = lambda request: (200, {"Content-Encoding": "gzip"}, gzip.compress(b"1.0"))
    assert "the reply is not JSON" in failure(server.url)
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


def test_a_redirect_is_not_followed(server):
    server.answer = lambda request: (307, {"Location": f"{server.url}/there?token=secret"}, "")
    assert f"status 307, a redirect to {server.url}/there. Redirects are not followed; set url" in failure(server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://user:secret@host/x?secret", "url=ftp://host/x must be an http or https address"),
        ("file:///etc/passwd", "url='file:///etc/passwd' must be an http"),
        ("localhost:8000/score", "url='localhost:8000/score' must be an http"),
        ("", "url='' must be an http"),
        ("http://", "url='http://' must be an http"),
        ("http://host:99999/x", "url=http://host:99999/x must be an http"),
        ("http://user:sec/ret@host:x", "url=(not shown, it may hold a password) must be an http"),
        ("user:secret@host/x", "url=(not shown, it may hold a password) must be an http"),
        (8000, "url=8000 must be an http"),
    ],
)
def test_an_invalid_url_is_rejected(url, shown):
    message = failure(url)
    assert shown in message
    assert "secret" not in message


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("retries", (-1, 1.5), "must be a whole number, 0 or more"),
        ("requests_per_second", (-1.0, float("nan"), "5"), "must be a finite number, 0 or more"),
        ("request_timeout_s", (0.0,), "must be more than 0"),
    ],
)
def test_settings_out_of_range_are_rejected(server, name, values, message):
    for value in values:
        assert f"{name}={value!r} {message}" in failure(server.url, **{name: value})
    assert server.requests == []


def test_values_without_json_are_not_sent(server):
    for value in (float("nan"), {1, 2}, datetime(2020, 1, 1), {(1, 2): 3}):
        assert "the sample cannot be sent as JSON" in failure(server.url, {"extra_info": value})
    assert server.requests == []


def test_the_rate_limit_covers_all_samples_and_retries(server, pauses, monkeypatch):
    monkeypatch.setattr(http_client, "BACKOFF_S", 0.0)
    server.answer = lambda request: BUSY if len(server.requests) % 2 else 1.0

    async def many():
        return await asyncio.gather(*(post_once(server.url, requests_per_second=20.0, retries=20) for _ in range(10)))

    assert asyncio.run(many()) == [1.0] * 10
    assert len(server.requests) >= 20
    waited = [seconds for seconds in pauses.seconds if seconds > 0]
    assert waited == pytest.approx([1 / 20] * (len(server.requests) - 1))  # all but the first attempt


def test_canceled_samples_do_not_use_the_rate_limit(server, pauses):
    async def cancelled_then_one():
        pauses.is_stopped = True
        waiting = [asyncio.create_task(post_once(server.url, requests_per_second=5.0)) for _ in range(50)]
        while len(pauses.seconds) < 2:  # the second sample waits for its turn, and the others for it
            await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        pauses.is_stopped = False
        await post_once(server.url, requests_per_second=5.0)

    asyncio.run(cancelled_then_one())
    assert pauses.seconds == pytest.approx([0.0, 1 / 5, 1 / 5])


def test_canceled_samples_release_their_connections(server, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_CONNECTIONS", 2)
    server.answer = server.hang

    async def cancelled_then_many():
        for num_sent in (2, 4, 6):
            hanging = [asyncio.create_task(post_once(server.url)) for _ in range(4)]
            while len(server.requests) < num_sent:  # the other two wait for a connection
                await asyncio.sleep(0.01)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
        server.answer = lambda request: 1.0
        return await asyncio.gather(*(post_once(server.url) for _ in range(10)))

    assert asyncio.run(cancelled_then_many()) == [1.0] * 10


def test_many_samples_share_few_connections(server, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_CONNECTIONS", 4)
    server.answer = lambda request: time.sleep(0.005) or 1.0

    async def many():
        first = await asyncio.gather(*(post_once(server.url) for _ in range(30)))
        return first + await asyncio.gather(*(post_once(server.url) for _ in range(30)))

    assert asyncio.run(many()) == [1.0] * 60
    assert server.num_connections <= 4


def test_waiting_for_a_connection_does_not_count_in_the_timeout(server, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_CONNECTIONS", 1)
    num_running = []  # after the start and the end of each timeout

    @asynccontextmanager
    async def timeout(seconds):
        num_running.append(num_running[-1] + 1 if num_running else 1)
        yield
        num_running.append(num_running[-1] - 1)

    monkeypatch.setattr(http_client, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout}))

    async def many():
        return await asyncio.gather(*(post_once(server.url, retries=0) for _ in range(20)))

    assert asyncio.run(many()) == [1.0] * 20
    assert num_running == [1, 0] * 20


def test_connections_close_with_their_event_loop(server):
    for _ in range(3):
        post(server.url)
    assert server.num_connections == 3
    assert http_client._endpoints == {}


def test_the_key_is_sent_and_redacted_in_errors(server, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "sk-123456\n")
    assert post(server.url, api_key_env="SCORER_KEY") == 1.0
    assert server.requests[0].headers["Authorization"] == "Bearer sk-123456"
    server.answer = lambda request: (401, {}, "x" * 195 + "no such key: " + request.headers["Authorization"])
    assert "api_key_env to the name of" in failure(server.url, api_key_env="SCORER_KEY")
    for body in ("not sk-123456", "x" * 196 + "sk-123456"):
        server.answer = lambda request, body=body: (401, {}, body)
        assert "sk-1" not in failure(server.url, api_key_env="SCORER_KEY")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("SCORER_KEY", ("", " "), "api_key_env='SCORER_KEY' must be the name of an environment variable"),
        ("sk-123456", ("",), "api_key_env=(not shown, it may be a key itself) must be the name of an environment var"),
        ("SCORER_KEY", ("two words", "line\nbreak", "schlüssel"), "SCORER_KEY must be ASCII without spaces."),
    ],
)
def test_a_wrong_key_is_an_error_that_does_not_show_it(server, monkeypatch, name, values, message):
    for value in values:
        monkeypatch.setenv("SCORER_KEY", value)
        found = failure(server.url, api_key_env=name)
        assert message in found
        assert "sk-" not in found
    assert server.requests == []


def test_user_password_and_query_of_the_url_are_sent_and_not_shown(server, monkeypatch):
    url = server.url.replace("//", "//me:pass1@") + "?token=pass2"
    server.answer = lambda request: (404, {}, f"nothing at {request.path}, pass1")
    message = failure(url)
    assert f"POST {server.url} failed" in message
    assert "'nothing at /score?[hidden], [hidden]'" in message
    assert server.requests[0].path == "/score?token=pass2"
    assert server.requests[0].headers["Authorization"].startswith("Basic ")
    monkeypatch.setenv("SCORER_KEY", "sk-123456")
    assert "has a user or password, and api_key_env is set" in failure(url, api_key_env="SCORER_KEY")
