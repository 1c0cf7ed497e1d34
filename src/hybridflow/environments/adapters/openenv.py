"""Environments of OpenEnv: "openenv:URL" of a server that runs.

The schema of the server says what an action is: one text, or an object of several fields, which a turn has as JSON.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import httpx2
from openenv.core.generic_client import GenericEnvClient
from websockets.exceptions import ConnectionClosed

from hybridflow.environments.adapters.stepping import SteppingEnvironment, WrongActionError, seed_of
from hybridflow.errors import EnvironmentConfigError

_TIMEOUT_S = 10.0
_MESSAGE_TIMEOUT_S = 86_400.0
"""Seconds for an answer of the server; `reward.timeout_s` ends the wait before."""


def make(rest: str) -> type["_OpenEnv"]:
    """Return the class of a server's environment. Raises EnvironmentConfigError if none answers."""
    url = rest.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise EnvironmentConfigError(f"{rest!r} is not the URL of a server; expected http://HOST:PORT.")
    try:
        schema = httpx2.get(f"{url}/schema", timeout=_TIMEOUT_S).raise_for_status().json()["action"]
        fields = {name: field for name, field in schema["properties"].items() if name != "metadata"}
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EnvironmentConfigError(
            f"no OpenEnv server answers {url}/schema: {type(error).__name__}: {error}; start it first."
        ) from error
    needed = [name for name in schema.get("required", ()) if name in fields] or [*fields]
    text = needed[0] if len(needed) == 1 and fields[needed[0]].get("type") == "string" else ""
    valid = f"a text, the {text} of the action" if text else f"a JSON object with the fields {json.dumps(fields)}"
    return type(str(schema.get("title", "OpenEnv")), (_OpenEnv,), {"url": url, "text": text, "valid": valid})


class _OpenEnv(SteppingEnvironment):
    """An episode of a server's environment, which has a session of its own there."""

    url: str
    text: str
    valid: str

    async def _begin(self, row: Mapping[str, Any]) -> str:
        self._client = GenericEnvClient(self.url, message_timeout_s=_MESSAGE_TIMEOUT_S)
        seed = seed_of(row)
        try:
            result = await self._client.reset(**({} if seed is None else {"seed": seed}))
        except (RuntimeError, ConnectionClosed) as error:  # a full server says so and closes the connection
            if isinstance(error, RuntimeError) and "(code: CAPACITY_REACHED)" not in str(error):
                raise
            raise EnvironmentConfigError(
                f"{error}: each episode of a batch has its session; start the server with max_concurrent_envs of at "
                "least data.train_batch_size * rollout.group_size"
            ) from error
        return _text(result.observation)

    async def _act(self, text: str) -> tuple[str, float, bool]:
        found = re.search(r"\{.*\}", text, re.S)
        try:
            action = {self.text: text.strip()} if self.text else json.loads(found[0] if found else "")
            result = await self._client.step(action)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "(code: VALIDATION_ERROR)" not in str(error):
                raise
            raise WrongActionError(f"This is not an action. Answer with {self.valid}.") from error
        return _text(result.observation), float(result.reward or 0.0), result.done

    async def close(self) -> None:
        if hasattr(self, "_client"):
            await self._client.close()


def _text(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: that of its only field, or all as JSON."""
    fields = {name: value for name, value in observation.items() if name not in ("done", "reward", "metadata")}
    values = [*fields.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)
