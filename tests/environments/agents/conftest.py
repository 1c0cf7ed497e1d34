"""The endpoint on an event loop in a thread, and scripted sessions that it serves."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fixtures.scripted_session import ScriptedSession
from hybridflow.environments.agents.endpoint import Endpoint


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def on_loop(loop) -> Callable[..., Any]:
    """Return `on_loop(function, *arguments)`, which calls a function or a coroutine function on the loop."""

    async def call(function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        return await result if asyncio.iscoroutine(result) else result

    return lambda *call_of: asyncio.run_coroutine_threadsafe(call(*call_of), loop).result(60)


@pytest.fixture(scope="module")
def endpoint(on_loop) -> Iterator[Endpoint]:
    served = Endpoint(keep_alive_s=0.05)
    on_loop(served.start)
    yield served
    on_loop(served.stop)


@pytest.fixture
def serve(endpoint, on_loop) -> Iterator[Callable[..., tuple[ScriptedSession, str]]]:
    """Yield `serve(script, **ending)`, which returns a session and its address; it ends with the test."""
    served = []

    def start(*script: Any, **ending: Any) -> tuple[ScriptedSession, str]:
        session, session_id = ScriptedSession(script, **ending), f"s{len(served)}"
        on_loop(endpoint.sessions.__setitem__, session_id, session)
        served.append(session_id)
        return session, f"{endpoint.base_url}/{session_id}"

    yield start
    for session_id in served:
        on_loop(endpoint.remove, session_id)
