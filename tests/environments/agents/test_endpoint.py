"""The server: clients that go, wait, read nothing or come too late, and its own beginning and end."""

import asyncio
import json
import re
import signal
import socket
import time
from contextlib import contextmanager

import openai
import pytest

from fixtures.scripted_session import ScriptedSession
from hybridflow.environments.agents.endpoint import Endpoint
from hybridflow.environments.episodes.messages import AssistantTurn
from hybridflow.errors import EnvironmentConfigError

USER = {"role": "user", "content": "hi"}
HELLO = AssistantTurn("Hello")
LONG = AssistantTurn("word " * 2_000_000)
"""A turn that no buffer of a socket holds."""


@contextmanager
def request(address, body=None, *, length=None, path="/v1/chat/completions", **fields):
    """Yield a connection that has sent a request, or the first bytes of one."""
    body = json.dumps({"model": "m", "messages": [USER], **fields}).encode() if body is None else body
    port, session_id = re.fullmatch(r"http://127.0.0.1:(\d+)(.*)", address).groups()
    head = f"POST {session_id}{path} HTTP/1.1\r\nhost: x\r\nx-api-key: the key\r\n"
    with socket.create_connection(("127.0.0.1", int(port)), 60) as connection:
        connection.sendall(f"{head}content-length: {length or len(body)}\r\n\r\n".encode() + body)
        yield connection


def read_until(connection, text):
    """Return what is read until a text."""
    found = b""
    while text not in found:
        chunk = connection.recv(65536)
        assert chunk, found[-500:]
        found += chunk
    return found


def wait_for_open(session, number):
    """Wait until a session has so many open requests."""
    while session.num_open != number:
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_is_cancelled_if_its_client_goes(stream, serve):
    session, address = serve(None)
    with request(address, stream=stream) as connection:
        assert session.began.wait(60)
        if stream:
            read_until(connection, b": the model works\n\n")
    assert session.cancelled.wait(60)
    wait_for_open(session, 0)
    assert session.dropped == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_its_client_did_not_read_is_dropped(stream, serve):
    session, address = serve(LONG)
    with request(address, stream=stream) as connection:
        read_until(connection, b"HTTP/1.1 200")
    wait_for_open(session, 0)
    assert session.dropped == ["t1"]


def test_a_slow_client_gets_its_whole_turn(serve):
    session, address = serve(LONG)
    with request(address) as connection:
        assert session.began.wait(60)
        read = read_until(connection, b'"total_tokens":5}}')
    assert json.loads(read.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == LONG.content
    wait_for_open(session, 0)
    assert session.dropped == []


def test_a_turn_that_is_not_read_is_cut_off_when_its_episode_ends(serve, endpoint, on_loop):
    session, address = serve(LONG)
    with request(address, stream=True) as connection:
        read = read_until(connection, b"HTTP/1.1 200")
        on_loop(endpoint.remove, "s0")
        wait_for_open(session, 0)
        while chunk := connection.recv(2**20):
            read += chunk
    assert session.dropped == ["t1"]
    assert b"session_ended" not in read


@pytest.mark.parametrize(
    ("path", "sign", "error"),
    [
        ("/v1/chat/completions", b": the model works\n\n", b'data: {"error":{"message":"the episode of the session'),
        ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n', b"event: error\ndata: "),
    ],
)
def test_a_waiting_stream_has_signs_of_life_and_ends_with_its_episode(path, sign, error, serve, endpoint, on_loop):
    session, address = serve(None)
    with request(address, path=path, stream=True, max_tokens=5) as connection:
        read_until(connection, sign)
        read_until(connection, sign)
        on_loop(endpoint.remove, "s0")
        read_until(connection, error)
    assert session.cancelled.wait(60)
    assert session.num_open == 0


@pytest.mark.parametrize("body", [b'{"model": "m", ', None], ids=["half a body", "a turn that is sampled"])
def test_open_requests_are_refused_when_their_episode_ends(body, serve, endpoint, on_loop):
    session, address = serve(None)
    with request(address, body, length=100 if body else None) as connection:
        if body:
            wait_for_open(session, 1)
        else:
            assert session.began.wait(60)
        on_loop(endpoint.remove, "s0")
        assert read_until(connection, b'"code":"session_ended"').startswith(b"HTTP/1.1 410 ")
    assert session.num_open == 0
    assert bool(session.requests) == (not body)


def test_half_a_body_holds_one_request_until_its_client_goes(serve):
    session, address = serve(HELLO)
    with request(address, b"{", length=100):
        wait_for_open(session, 1)
        with openai.OpenAI(base_url=f"{address}/v1", api_key="the key", max_retries=0) as client:
            client.chat.completions.create(model="m", messages=[USER])
        wait_for_open(session, 1)
    wait_for_open(session, 0)


def test_a_session_without_an_id_is_served_at_the_base_url(endpoint, on_loop):
    session = ScriptedSession([HELLO])
    on_loop(endpoint.sessions.__setitem__, "", session)
    with openai.OpenAI(base_url=f"{endpoint.base_url}/v1", api_key="the key", max_retries=0) as client:
        assert client.chat.completions.create(model="m", messages=[USER]).choices[0].message.content == "Hello"
        on_loop(endpoint.remove, "")
        with pytest.raises(openai.APIStatusError, match="has ended"):
            client.chat.completions.create(model="m", messages=[USER])


def test_thirty_clients_at_once_get_their_own_turns(serve, on_loop, endpoint):
    served = [serve(AssistantTurn(f"turn {number}")) for number in range(30)]

    async def ask():
        async with openai.AsyncOpenAI(base_url="http://x", api_key="the key", max_retries=0) as client:
            asked = [
                client.with_options(base_url=f"{address}/v1").chat.completions.create(model="m", messages=[USER])
                for _, address in served
            ]
            return [each.choices[0].message.content for each in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [f"turn {number}" for number in range(30)]
    for session, _ in served:
        wait_for_open(session, 0)


def test_the_server_ends_with_open_requests_and_keeps_handlers_of_signals():
    async def run():
        handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
        endpoint = Endpoint()
        await endpoint.start()
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        session = ScriptedSession([None, LONG])
        endpoint.sessions["a"] = session
        with (
            socket.create_connection(("127.0.0.1", endpoint.port)),
            request(f"{endpoint.base_url}/a") as waiting,
            request(f"{endpoint.base_url}/a"),
        ):
            while session.script:
                await asyncio.sleep(0.01)
            await endpoint.stop()
            assert b"410" in waiting.recv(100)
            assert not endpoint._server.server_state.connections
        assert session.cancelled.is_set()
        assert session.dropped == ["t2"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", endpoint.port))
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(run()) == set()


def test_an_endpoint_that_never_served_closes_its_socket():
    endpoint = Endpoint()
    asyncio.run(endpoint.stop())
    Endpoint(port=endpoint.port)._socket.close()


def test_a_port_in_use_is_an_error_that_names_it(endpoint):
    with pytest.raises(EnvironmentConfigError, match=rf"port {endpoint.port}: .*; use another host or port, or port 0"):
        Endpoint(port=endpoint.port)


def test_an_endpoint_listens_on_ipv6():
    try:
        endpoint = Endpoint("::1")
    except EnvironmentConfigError as error:
        pytest.skip(str(error))
    assert endpoint.base_url == f"http://[::1]:{endpoint.port}"
    asyncio.run(endpoint.stop())
