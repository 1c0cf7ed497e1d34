"""The HTTP server of sessions: an ASGI app on a port of loopback, in the event loop that plays the episodes.

    client --HTTP--> path and key: session --> body: ChatRequest --> session.complete --> ChatReply --> response

It knows protocols and whether a client is still there. What a turn is and how it is sampled, the session knows.
"""

import asyncio
import hmac
import logging
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvicorn

from hybridflow.environments.agents.anthropic_messages import AnthropicCount, AnthropicMessages
from hybridflow.environments.agents.bodies import json_text, parse_json
from hybridflow.environments.agents.chat import RefusedError
from hybridflow.environments.agents.openai_chat import OpenAIChat
from hybridflow.errors import EnvironmentConfigError

if TYPE_CHECKING:
    from hybridflow.environments.agents.session import Session

log = logging.getLogger(__name__)

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_CALLS = {
    "chat/completions": ("POST", OpenAIChat),
    "models": ("GET", OpenAIChat),
    "reward": ("POST", OpenAIChat),
    "waited": ("GET", OpenAIChat),
    "messages": ("POST", AnthropicMessages),
    "messages/count_tokens": ("POST", AnthropicCount),
}
_PATH = re.compile(r"(?:/(?P<session>[^/]+))?/v1/(?P<call>.+)")
_BASE_URLS = "The base URL of OpenAI's clients ends in /v1, that of Anthropic's clients does not."
_NUM_REMEMBERED = 10_000
"""Sessions that have ended and whose requests get an error that says so."""
_NUM_BODIES_READ = 16
"""Part of a too large body that is read, in multiples of the largest allowed size."""
_MODEL = {"id": "hybridflow", "object": "model", "created": 0, "owned_by": "hybridflow"} | {
    "type": "model",
    "display_name": "hybridflow",
    "created_at": "1970-01-01T00:00:00Z",
}
"""The model as OpenAI and as Anthropic list it."""


class _GoneError(Exception):
    """The client has closed its connection."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the program keeps its own handlers


@dataclass
class Endpoint:
    """Serves sessions at `{base_url}/{SESSION_ID}/v1`, and the session whose id is empty at `{base_url}/v1`.

    All methods are called in one event loop. Port 0 takes a free one. A stream gets a sign of life every `keep_alive_s`
    seconds until its turn is there.
    """

    host: str = "127.0.0.1"
    port: int = 0
    keep_alive_s: float = 10.0
    sessions: dict[str, "Session"] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            self._socket = socket.create_server((self.host, self.port), family=family, backlog=2048)
        except (OSError, OverflowError) as error:
            found = f"an endpoint cannot listen on {self.host}, port {self.port}: {error}"
            raise EnvironmentConfigError(f"{found}; use another host or port, or port 0 for a free one") from error
        self.port = self._socket.getsockname()[1]
        self._ended: deque[str] = deque(maxlen=_NUM_REMEMBERED)
        self._requests: dict[asyncio.Task[Any], str] = {}
        self._rendering = asyncio.Lock()  # takes seconds for long conversations; other tasks run in between
        config = uvicorn.Config(
            self,
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            log_config=None,
            log_level=logging.CRITICAL,  # requests that are wrong do not belong into the log of a run
            timeout_keep_alive=60,
            timeout_graceful_shutdown=5,
        )
        self._server, self._serving = _Server(config), None

    @property
    def base_url(self) -> str:
        """The URL of the server, without a session."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Serve as a task of the running event loop."""
        self._serving = asyncio.create_task(self._serve())
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.01)

    async def _serve(self) -> None:
        try:
            await self._server.serve([self._socket])
        finally:  # also if the loop ends, which cancels all tasks
            for server in self._server.servers:
                server.close()
            self._socket.close()

    async def stop(self) -> None:
        """End the open requests and the server, and close its sockets."""
        await asyncio.gather(*map(self.remove, list(self.sessions)))
        if self._serving is None:
            self._socket.close()
            return
        self._server.should_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # a client that does not read would keep it open
        await self._serving

    async def remove(self, session_id: str) -> None:
        """End the open requests of a session; they and later ones get an error that says that it has ended.

        It returns when what could not be delivered was dropped.
        """
        self.sessions.pop(session_id, None)
        self._ended.append(session_id)
        open_requests = [task for task, asked in self._requests.items() if asked == session_id]
        for task in open_requests:
            task.cancel()
        if open_requests:
            await asyncio.wait(open_requests, timeout=5)  # a client need not read

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Answer one request: the ASGI app."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = _Exchange(scope["method"], headers, receive, send, self.keep_alive_s)
        path = _PATH.fullmatch(scope["path"])
        session_id, call = (path["session"] or "", path["call"]) if path else ("", "")
        is_anthropic = call.startswith("messages") or "anthropic-version" in headers
        task = asyncio.current_task()
        assert task is not None
        self._requests[task] = session_id
        try:
            await self._answer(scope["path"], session_id, call, exchange)
            return
        except _GoneError:
            return
        except RefusedError as error:
            refused = error
            if session := self.sessions.get(session_id):
                session.refused = str(error)
        except asyncio.CancelledError:  # by `remove`
            task.uncancel()
            if exchange.is_over:
                return
            if exchange.has_turn:
                raise  # which closes the connection: its client may not read
            refused = _has_ended(session_id)
        except Exception:
            log.exception("a request to %s failed", scope["path"][:200])
            refused = RefusedError(500, "internal_error", "the endpoint failed; the log of the run says why")
        finally:
            del self._requests[task]
        await exchange.refuse(refused, AnthropicMessages if is_anthropic else OpenAIChat)

    async def _answer(self, path: str, session_id: str, call: str, exchange: "_Exchange") -> None:
        first, slash, model = call.partition("models/")
        call = call if first or not slash else "models"
        method, protocol = _CALLS.get(call, ("", OpenAIChat))
        if not method:
            known = ", ".join(f"{method} /v1/{name}" for name, (method, _) in _CALLS.items())
            raise RefusedError(404, "unknown_url", f"{ascii(path)[:200]} is not served; known: {known}. {_BASE_URLS}")
        session = self.sessions.get(session_id)
        if session is None:
            unknown = RefusedError(
                404, "unknown_session", f"there is no session {ascii(session_id)[:100]}. {_BASE_URLS}"
            )
            raise _has_ended(session_id) if session_id in self._ended else unknown
        scheme, _, bearer = exchange.headers.get("authorization", "").partition(" ")
        keys = [exchange.headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        if not any(hmac.compare_digest(key.encode(), session.key.encode()) for key in keys):
            wanted = "the key of the session is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise RefusedError(401, "invalid_api_key", wanted)
        if exchange.method != method:
            raise RefusedError(405, "wrong_method", f"{exchange.method} is not supported here; use {method}")
        if call == "waited":  # which is asked for the agent, beside its requests
            return await exchange.reply({"seconds": session.waited_s})
        with session.open():
            if call == "models":
                if model not in ("", _MODEL["id"]):
                    problem = f"there is no model {ascii(model)[:100]}; the one that is served is {_MODEL['id']!r}"
                    raise RefusedError(404, "model_not_found", problem)
                ids = {"first_id": _MODEL["id"], "last_id": _MODEL["id"]}
                listed = {"object": "list", "data": [_MODEL], "has_more": False, **ids}
                return await exchange.reply(_MODEL if model else listed)
            body = await exchange.body(session.max_body_bytes)
            if call == "reward":
                session.set_reward(parse_json(body))
                return await exchange.reply({"accepted": True})
            asked = protocol.read(body)
            await self._rendering.acquire()
            asyncio.get_running_loop().call_soon(self._rendering.release)
            if protocol is AnthropicCount:
                return await exchange.reply({"input_tokens": await session.count_tokens(asked.request())})
            return await exchange.turn(session, asked)


@dataclass
class _Exchange:
    """One request and its response, and whether the client is still there."""

    method: str
    headers: Mapping[str, str]
    receive: Receive
    send: Send
    keep_alive_s: float
    has_begun: bool = False
    has_turn: bool = False
    is_over: bool = False

    async def body(self, max_bytes: int) -> bytes:
        """Return the body. Of a larger one some is read and thrown away, as most clients read no error before that."""
        if encoding := self.headers.get("content-encoding"):
            problem = f"content-encoding={encoding[:50]!r} is not supported; send plain JSON"
            raise RefusedError(415, "encoded_body", problem)
        body, most = bytearray(), _NUM_BODIES_READ * max_bytes
        has_more = int(self.headers.get("content-length", 0)) <= most
        size = 0 if has_more else most
        while has_more and size <= most:
            event = await self.receive()
            if event["type"] == "http.disconnect":
                raise _GoneError
            size, has_more = size + len(event["body"]), event["more_body"]
            body += event["body"] if size <= max_bytes else b""
        if size > max_bytes:
            raise RefusedError(413, "body_too_large", f"a body may have {max_bytes:,} bytes; this one has more")
        return bytes(body)

    async def reply(self, body: dict[str, Any], status: int = 200, *, is_last: bool = True) -> None:
        content = json_text(body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        await self._begin(status, headers | ({"connection": "close"} if status == 413 else {}))  # it may be unread
        await self._send(content, is_last=is_last)

    async def refuse(self, error: RefusedError, protocol: type[OpenAIChat | AnthropicMessages]) -> None:
        """Send an error; a stream ends with it."""
        if self.has_begun:
            await self._send(protocol.error_event(error).encode(), is_last=True)
        else:
            await self.reply(protocol.error(error), error.status)

    async def turn(self, session: "Session", asked: OpenAIChat | AnthropicMessages) -> None:
        """Send a turn. It is cancelled if the client goes, and dropped if it has not reached the client."""
        is_delivered = False
        sampling = asyncio.ensure_future(session.complete(asked.request()))
        gone = asyncio.ensure_future(self._disconnected())
        try:
            while not sampling.done():
                timeout = self.keep_alive_s if asked.stream else None
                await asyncio.wait({sampling, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise _GoneError
                if not sampling.done():
                    await self._send_events(asked.keep_alive)
            reply, self.has_turn = sampling.result(), True
            if asked.stream:
                await self._send_events("".join(asked.events(reply)))
            else:
                await self.reply(asked.response(reply), is_last=False)
            await self._send(b"", is_last=True)  # returns when a slow client has read
            is_delivered = not gone.done()
        finally:
            gone.cancel()  # without a wait, in which `remove` would cancel what was delivered, and close its connection
            has_failed = sampling.cancel() or sampling.cancelled() or sampling.exception()
            if not (has_failed or is_delivered):
                session.drop(sampling.result().turn_id)

    async def _send_events(self, text: str) -> None:
        if not self.has_begun:
            await self._begin(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"})
        await self._send(text.encode())

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.has_begun = True
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send(self, body: bytes, *, is_last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self.is_over = is_last

    async def _disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _has_ended(session_id: str) -> RefusedError:
    return RefusedError(410, "session_ended", f"the episode of the session {ascii(session_id)[:100]} has ended")
