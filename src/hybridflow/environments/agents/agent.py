"""The user's side of an agent: a program that calls the model itself, by the address that it gets."""

import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from hybridflow.config.environment_sources import scheme_of
from hybridflow.environments.episodes.environment import Environment
from hybridflow.environments.processes.user_errors import returns_awaitable
from hybridflow.errors import EnvironmentConfigError


@dataclass(frozen=True)
class AgentSession:
    """The address of the model for one episode, and the key for it.

    `base_url` is that of OpenAI's clients. Requests may also be those of Anthropic's clients.
    """

    base_url: str
    api_key: str

    @property
    def anthropic_base_url(self) -> str:
        """The address for Anthropic's clients, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


def seconds_waited(session: AgentSession) -> float:
    """Return the seconds in which the agent has waited for turns; 0 if its episode has ended."""
    request = Request(f"{session.base_url}/waited", headers={"x-api-key": session.api_key})
    with suppress(OSError, ValueError), build_opener(ProxyHandler({})).open(request, timeout=60) as found:
        return float(json.load(found)["seconds"])
    return 0.0


class Agent(Environment):
    """Base class of agents. A class may also have `reward`, `group_rewards` and `close`; it has no tools.

    A function `async def agent(session, row)` is an agent whose class has nothing else.
    """

    async def run(self, session: AgentSession, row: Mapping[str, Any]) -> float | Mapping[str, Any] | None:
        """Play the episode of a row; return what it is worth, or None if `reward` or reward.function says it."""
        raise NotImplementedError


def environment_class(found: Any, name: str) -> type[Environment]:
    """Return what the user has named as a class: itself, or the agent of a function.

    Raises EnvironmentConfigError for a function that is not `async` or does not take a session and a row.
    """
    if isinstance(found, type):
        return found
    if not returns_awaitable(getattr(found, "func", found)):
        raise EnvironmentConfigError(
            f"'{name}' is neither a class nor an `async` function; an environment is a subclass of "
            "hybridflow.environments.Environment, an agent is `async def agent(session, row)`."
        )
    try:
        inspect.signature(found).bind(None, {})
    except TypeError as error:
        raise EnvironmentConfigError(
            f"the agent '{name}' cannot be called as agent(session, row): {error}; change its parameters."
        ) from error
    title, module = getattr(found, "__name__", "agent"), getattr(found, "__module__", __name__)
    members = {
        "run": lambda _, session, row: found(session, row),
        "__doc__": inspect.getdoc(found),
        "__module__": module,
    }
    return type(title, (Agent,), members)


def names_agent(source: str) -> bool:
    """Return whether a source names an agent, as far as its file shows: an `async` function, or a class of `Agent`."""
    place, _, name = source.rpartition(":")
    if scheme := scheme_of(source):
        return scheme in ("command", "verifiers")
    with suppress(OSError, ValueError, ImportError):
        path = place if place.endswith(".py") else getattr(find_spec(place), "origin", None)
        text = Path(path or "").expanduser().read_text("utf-8")
        return bool(re.search(rf"^async def {name}\b|^class {name}\([^)]*\bAgent\b", text, re.MULTILINE))
    return False
