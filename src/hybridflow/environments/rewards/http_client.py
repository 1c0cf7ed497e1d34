"""HTTP client that posts JSON and reads JSON, with retries and a rate limit; knows nothing of rewards but RewardError.

payload ──> one of the url's connections ──> wait for the rate limit ──> server ──> JSON
                 ^                                                         │
                 └──────────── back-off, or Retry-After ───────────────────┘
"""

import asyncio
import json
import os
import random
import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from hybridflow.environments.rewards.limits import require_number, require_seconds, require_whole
from hybridflow.errors import RewardError

if TYPE_CHECKING:
    import httpx2  # imported at first use

MAX_CONNECTIONS = 64
"""Connections to one url from one process."""

MAX_REPLY_BYTES = 2**20
MAX_SHOWN_CHARS = 200
BACKOFF_S = 1.0
"""Longest pause before the second attempt, in seconds; it doubles with each further attempt."""

MAX_BACKOFF_S = 30.0
MAX_RETRY_AFTER_S = 60.0
RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""

_jitter = random.Random()  # a separate generator: the global one belongs to the reward function


async def post_json(
    url: str,
    payload: Mapping[str, Any],
    *,
    retries: int,
    requests_per_second: float,
    request_timeout_s: float,
    api_key_env: str = "",
) -> Any:
    """POST `payload` as JSON to an http or https address and return the JSON of the reply.

    All calls of an event loop for one url share connections and the rate limit (0: none), which counts each attempt.
    A failed connection, a timeout after `request_timeout_s` and the statuses in `RETRIED_STATUSES` are retried up to
    `retries` times, so the server may receive a request more than once. Redirects are not followed. Proxies come from
    the environment (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY). `api_key_env` names the environment variable with
    the key that is sent as a bearer token.

    Raises RewardError, which shows neither the key nor the user, password and query of the url.
    """
    require_whole("retries", retries, least=0)
    require_number("requests_per_second", requests_per_second, least=0)  # 0: no limit
    require_seconds("request_timeout_s", request_timeout_s)
    key = _api_key(api_key_env)
    shown, secrets = _parse_url(url, key)
    contents = _to_json(payload)
    headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    endpoint = await _endpoint(url)
    attempt = 0
    while True:
        attempt += 1
        try:
            return await endpoint.post(contents, headers, requests_per_second, request_timeout_s)
        except _AttemptError as error:
            failed = error
        if not failed.is_retried or attempt > retries:
            break
        await asyncio.sleep(_pause_s(attempt, failed.retry_after))
    attempts = "1 attempt" if attempt == 1 else f"{attempt} attempts"
    reply = f": {_redact(failed.reply, secrets)[:MAX_SHOWN_CHARS]!r}" if failed.reply else ""
    settings = f"{retries=}, {requests_per_second=}, {request_timeout_s=}, {api_key_env=}"
    raise RewardError(
        f"POST {shown} failed after {attempts}, {_redact(failed.problem, secrets)}{reply}. {failed.fix} ({settings})"
    )


def without_key(text: str, api_key_env: str) -> str:
    """Return the text with the key in this environment variable redacted, in case a server repeats it."""
    return _redact(text, [os.environ.get(api_key_env, "").strip()])


class _AttemptError(Exception):
    """A failed attempt: the problem and the `reply` of the server or the library, which may hold secrets."""

    def __init__(self, problem: str, reply: str, fix: str, *, is_retried: bool = False, retry_after: str = "") -> None:
        super().__init__(problem)
        self.problem, self.reply, self.fix = problem, reply, fix
        self.is_retried, self.retry_after = is_retried, retry_after


@dataclass(eq=False)
class _Endpoint:
    """Client, connections and rate limit that all samples of an event loop share for one url."""

    url: str
    client: "httpx2.AsyncClient"
    # Samples wait for a connection here: waiting in the client would count toward the timeout.
    connections: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONNECTIONS))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_turn_at: float = 0.0
    closing: AsyncGenerator[None, None] | None = None

    async def post(
        self, contents: bytes, headers: Mapping[str, str], requests_per_second: float, timeout_s: float
    ) -> Any:
        """Return the JSON of the reply to one attempt; raise _AttemptError without one."""
        import httpx2

        async with self.connections:
            if requests_per_second:
                await self._take_turn(1 / requests_per_second)
            try:
                async with (
                    asyncio.timeout(timeout_s),
                    self.client.stream("POST", self.url, content=contents, headers=dict(headers)) as response,
                ):
                    body = await _read(response)
            except TimeoutError:
                problem, fix = f"no complete reply within {timeout_s} s", "Raise request_timeout_s if it needs longer."
                raise _AttemptError(problem, "", fix, is_retried=True) from None
            except httpx2.RequestError as error:
                lost = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException, httpx2.ProxyError)
                fix = "Check that the server runs and this machine reaches it; proxies of the environment are used."
                is_retried = isinstance(error, lost)
                raise _AttemptError(type(error).__name__, str(error), fix, is_retried=is_retried) from None
            return _value_of(response, body)

    async def _take_turn(self, interval_s: float) -> None:
        """Wait for the next turn, in order of arrival; a call that is canceled while waiting uses no turn."""
        clock = asyncio.get_running_loop().time
        async with self.turn:
            turn_at = max(self.next_turn_at, clock())
            await asyncio.sleep(turn_at - clock())
            self.next_turn_at = turn_at + interval_s


_endpoints: dict[tuple[asyncio.AbstractEventLoop, str], _Endpoint] = {}


async def _endpoint(url: str) -> _Endpoint:
    import httpx2

    place = (asyncio.get_running_loop(), url)
    if place not in _endpoints:
        limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
        client = httpx2.AsyncClient(verify=_tls(), timeout=None, limits=limits, follow_redirects=False)
        endpoint = _endpoints[place] = _Endpoint(url, client)
        endpoint.closing = _close_with_the_loop(place)
        await anext(endpoint.closing)
    return _endpoints[place]


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS context that all clients share, since creating one reads all trusted certificates."""
    import httpx2

    return httpx2.create_ssl_context()


async def _close_with_the_loop(place: tuple[asyncio.AbstractEventLoop, str]) -> AsyncGenerator[None, None]:
    """Close the connections when `asyncio.run` ends, which closes all suspended generators such as this one."""
    try:
        yield
    finally:
        await _endpoints.pop(place).client.aclose()


async def _read(response: "httpx2.Response") -> bytes:
    """Return the raw body; stop reading beyond MAX_REPLY_BYTES."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            break
    return bytes(body)


def _value_of(response: "httpx2.Response", body: bytes) -> Any:
    """Return the JSON of a reply; raise _AttemptError without one."""
    status, reply = response.status_code, body.decode(errors="replace")
    problem = f"status {status}"
    if status in RETRIED_STATUSES:
        fix = "If the server is overloaded, lower requests_per_second; if it recovers later, raise retries."
        retry_after = response.headers.get("retry-after", "")
        raise _AttemptError(problem, reply, fix, is_retried=True, retry_after=retry_after)
    if 300 <= status < 400:
        target = _redacted_url(response.headers.get("location", ""))
        raise _AttemptError(
            f"{problem}, a redirect to {target}", reply, "Redirects are not followed; set url to the target."
        )
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        fix = "Set api_key_env to the name of an environment variable that holds a valid key."
        raise _AttemptError(problem, reply, fix)
    if not 200 <= status < 300:
        raise _AttemptError(problem, reply, "Check the url and what this server accepts.")
    if len(body) > MAX_REPLY_BYTES:
        fix = "Make the server return only what is needed."
        raise _AttemptError(f"the reply is larger than {MAX_REPLY_BYTES} bytes", reply, fix)
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        fix = "Check that url is the server's JSON interface."
        raise _AttemptError(f"{problem}, but the reply is not JSON", reply, fix) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _pause_s(attempt: int, retry_after: str) -> float:
    """Return seconds until the next attempt: full jitter, or the server's Retry-After plus up to BACKOFF_S."""
    asked = _seconds_of(retry_after)
    if asked is not None:
        return min(asked, MAX_RETRY_AFTER_S) + _jitter.uniform(0, BACKOFF_S)
    return _jitter.uniform(0, min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(attempt - 1, 30)))


def _seconds_of(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After header (seconds or an HTTP date); None for anything else."""
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", retry_after.strip()):
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _api_key(variable: str) -> str:
    """Return the key in this environment variable; "" if no variable is named."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        name = repr(variable) if re.fullmatch("[A-Z][A-Z0-9_]*", variable) else "(not shown, it may be a key itself)"
        raise RewardError(
            f"api_key_env={name} must be the name of an environment variable that holds the key, but it is not set; "
            "export it before the run starts."
        )
    if not re.fullmatch("[!-~]+", key):
        raise RewardError(f"the key in the environment variable {variable} must be ASCII without spaces.")
    return key


def _parse_url(url: str, key: str) -> tuple[str, list[str]]:
    """Return the address as errors show it, and the secrets that errors must not show."""
    import httpx2

    try:
        parts = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > 65535:
        raise RewardError(
            f"url={_redacted_url(url)} must be an http or https address, such as 'http://127.0.0.1:8000/score'."
        )
    if key and parts.userinfo:
        raise RewardError(
            f"url={_redacted_url(url)} has a user or password, and api_key_env is set; set only one of them."
        )
    return _redacted_url(url), [key, parts.password, parts.userinfo.decode(), parts.query.decode()]


def _redacted_url(url: str) -> str:
    """Return the address without user, password, query and fragment; hide an unparsable one that may hold them."""
    import httpx2

    with suppress(httpx2.InvalidURL, TypeError):
        parts = httpx2.URL(url)
        if parts.host:
            return str(parts.copy_with(userinfo=b"", query=None, fragment=None))
    return "(not shown, it may hold a password)" if re.search("[@?#]", str(url)) else repr(url)


def _redact(text: str, secrets: list[str]) -> str:
    for secret in filter(None, secrets):
        text = text.replace(secret, "[hidden]")
    return text


def _to_json(payload: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(payload, allow_nan=False, default=_as_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"the sample cannot be sent as JSON: {error}. Use finite numbers, texts, and lists and dicts of them as "
            "ground_truth and extra_info in the data."
        ) from error


def _as_plain(value: Any) -> Any:
    """Convert numbers and arrays of numpy to those of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
