"""POSTs JSON and reads JSON back, with retries and a rate limit; knows nothing of rewards but the error it raises.

payload ──> one of the url's connections ──> its turn by the rate ──> server ──> JSON
                 ^                                                      │
                 └──────────── back-off, or Retry-After ────────────────┘
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

from hybridflow.errors import RewardError
from hybridflow.rewards.limits import require_number, require_seconds, require_whole

if TYPE_CHECKING:
    import httpx2  # at run time it is imported at first use

MAX_CONNECTIONS = 64
"""To one url, of one process."""

MAX_REPLY_BYTES = 2**20
MAX_SHOWN_CHARS = 200
BACKOFF_S = 1.0
"""The longest pause before the second attempt; it doubles with each further one."""

MAX_BACKOFF_S = 30.0
MAX_RETRY_AFTER_S = 60.0
PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""The statuses after which the same request may succeed."""

_jitter = random.Random()  # of its own: the global one is the reward function's


async def post_json(
    url: str,
    payload: Mapping[str, Any],
    *,
    retries: int,
    requests_per_second: float,
    request_timeout_s: float,
    api_key_env: str = "",
) -> Any:
    """POST `payload` as JSON to an http or https address; returns the JSON of the reply.

    All calls of an event loop for one url share connections and the rate (0 = none), in which each attempt counts. A
    connection that fails, `request_timeout_s` and the statuses in `PASSING` are tried again `retries` times: the server
    may see a request more than once. Redirects are not followed. Proxies are those of the environment (HTTP_PROXY,
    HTTPS_PROXY, ALL_PROXY, NO_PROXY). `api_key_env` names the variable with the key that is sent as a bearer token.

    Raises RewardError, which shows neither the key nor the user, password and query of the url.
    """
    require_whole("retries", retries, least=0)
    require_number("requests_per_second", requests_per_second, least=0)  # 0 is no limit
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
        if not failed.is_passing or attempt > retries:
            break
        await asyncio.sleep(_pause_s(attempt, failed.retry_after))
    attempts = "1 attempt" if attempt == 1 else f"{attempt} attempts"
    said = f": {_hidden(failed.said, secrets)[:MAX_SHOWN_CHARS]!r}" if failed.said else ""
    settings = f"{retries=}, {requests_per_second=}, {request_timeout_s=}, {api_key_env=}"
    raise RewardError(
        f"POST {shown} failed after {attempts}, {_hidden(failed.what, secrets)}{said}. {failed.fix} ({settings})"
    )


def without_key(text: str, api_key_env: str) -> str:
    """The text with the key of this variable, if a server repeats it, hidden."""
    return _hidden(text, [os.environ.get(api_key_env, "").strip()])


class _AttemptError(Exception):
    """Why an attempt failed: `what` happened, and what the server or the library `said`, which may hold secrets."""

    def __init__(self, what: str, said: str, fix: str, *, is_passing: bool = False, retry_after: str = "") -> None:
        super().__init__(what)
        self.what, self.said, self.fix = what, said, fix
        self.is_passing, self.retry_after = is_passing, retry_after


@dataclass(eq=False)
class _Endpoint:
    """What all samples of an event loop share for one url."""

    url: str
    client: "httpx2.AsyncClient"
    # Waiting for a connection happens here, not in the client, whose waiting would count in the time-out.
    connections: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONNECTIONS))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    next_turn_at: float = 0.0
    closing: AsyncGenerator[None, None] | None = None

    async def post(
        self, contents: bytes, headers: Mapping[str, str], requests_per_second: float, timeout_s: float
    ) -> Any:
        """Return the JSON of the reply to one attempt; _AttemptError if there is none."""
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
                what, fix = f"no complete reply within {timeout_s} s", "Raise request_timeout_s if it needs longer."
                raise _AttemptError(what, "", fix, is_passing=True) from None
            except httpx2.RequestError as error:
                lost = (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.TimeoutException, httpx2.ProxyError)
                fix = "Look whether the server runs and this machine reaches it; a proxy of the environment is used."
                is_passing = isinstance(error, lost)
                raise _AttemptError(type(error).__name__, str(error), fix, is_passing=is_passing) from None
            return _value_of(response, body)

    async def _take_turn(self, interval_s: float) -> None:
        """Wait for the next turn, first come, first served; who is cancelled while waiting takes none."""
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
    """One for all clients: it reads every certificate that the machine trusts."""
    import httpx2

    return httpx2.create_ssl_context()


async def _close_with_the_loop(place: tuple[asyncio.AbstractEventLoop, str]) -> AsyncGenerator[None, None]:
    """`asyncio.run` closes the generators that it finds suspended when it ends; this one closes the connections."""
    try:
        yield
    finally:
        await _endpoints.pop(place).client.aclose()


async def _read(response: "httpx2.Response") -> bytes:
    """Return the body as it was sent; reading ends beyond MAX_REPLY_BYTES."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            break
    return bytes(body)


def _value_of(response: "httpx2.Response", body: bytes) -> Any:
    """Return the JSON of a reply; _AttemptError if there is none."""
    status, said = response.status_code, body.decode(errors="replace")
    what = f"status {status}"
    if status in PASSING:
        fix = "If the server is overloaded, lower requests_per_second; if it recovers later, raise retries."
        retry_after = response.headers.get("retry-after", "")
        raise _AttemptError(what, said, fix, is_passing=True, retry_after=retry_after)
    if 300 <= status < 400:
        target = _shown(response.headers.get("location", ""))
        raise _AttemptError(f"{what}, a redirect to {target}", said, "It is not followed; set url to where it leads.")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        fix = "Set api_key_env to the name of an environment variable that holds a valid key."
        raise _AttemptError(what, said, fix)
    if not 200 <= status < 300:
        raise _AttemptError(what, said, "Look whether url is right, and what this server takes.")
    if len(body) > MAX_REPLY_BYTES:
        fix = "Let the server return only what is needed."
        raise _AttemptError(f"the reply is larger than {MAX_REPLY_BYTES} bytes", said, fix)
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        fix = "Look whether url is the server's JSON interface."
        raise _AttemptError(f"{what}, but the reply is not JSON", said, fix) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _pause_s(attempt: int, retry_after: str) -> float:
    """Seconds until the next attempt: full jitter, or what the server asks for and up to BACKOFF_S more."""
    asked = _seconds_of(retry_after)
    if asked is not None:
        return min(asked, MAX_RETRY_AFTER_S) + _jitter.uniform(0, BACKOFF_S)
    return _jitter.uniform(0, min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(attempt - 1, 30)))


def _seconds_of(retry_after: str) -> float | None:
    """Retry-After, which is seconds or an HTTP date; None for anything else."""
    if re.fullmatch(r"[0-9]+(\.[0-9]*)?", retry_after.strip()):
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _api_key(variable: str) -> str:
    """The key in this environment variable; "" where no variable is named."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        name = repr(variable) if re.fullmatch("[A-Z][A-Z0-9_]*", variable) else "(not shown, it may be a key itself)"
        raise RewardError(
            f"api_key_env={name} must be the name of an environment variable that holds the key, and none of this "
            "name is set; export it before the run starts."
        )
    if not re.fullmatch("[!-~]+", key):
        raise RewardError(f"the key in the environment variable {variable} must be ASCII without spaces.")
    return key


def _parse_url(url: str, key: str) -> tuple[str, list[str]]:
    """The address as errors show it, and the texts that they never show."""
    import httpx2

    try:
        parts = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError):
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.host or (parts.port or 0) > 65535:
        raise RewardError(f"url={_shown(url)} must be an http or https address, such as 'http://127.0.0.1:8000/score'.")
    if key and parts.userinfo:
        raise RewardError(f"url={_shown(url)} has a user or password, and api_key_env is set; give one of both.")
    return _shown(url), [key, parts.password, parts.userinfo.decode(), parts.query.decode()]


def _shown(url: str) -> str:
    """The address without user, password, query and fragment; nothing of what cannot be parsed and may hold these."""
    import httpx2

    with suppress(httpx2.InvalidURL, TypeError):
        parts = httpx2.URL(url)
        if parts.host:
            return str(parts.copy_with(userinfo=b"", query=None, fragment=None))
    return "(not shown, it may hold a password)" if re.search("[@?#]", str(url)) else repr(url)


def _hidden(text: str, secrets: list[str]) -> str:
    for secret in filter(None, secrets):
        text = text.replace(secret, "[hidden]")
    return text


def _to_json(payload: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(payload, allow_nan=False, default=_as_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(
            f"the sample cannot be sent as JSON: {error}. Numbers (finite), texts, lists and dicts of these can; "
            "look at what the data has as ground_truth and extra_info."
        ) from error


def _as_plain(value: Any) -> Any:
    """numpy's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
