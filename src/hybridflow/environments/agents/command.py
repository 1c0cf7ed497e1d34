"""An agent that is a command of any language: it gets the row on standard input, the address in its environment."""

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from hybridflow.environments.agents.agent import Agent, AgentSession
from hybridflow.errors import EnvironmentConfigError

MAX_OUTPUT = 20_000
"""Characters of the output of a command that are kept: the last ones."""

CHUNK = 1 << 16


class CommandError(Exception):
    """A command that has failed."""


class CommandAgent(Agent):
    """Runs a command for each episode, in a session of its own, whose processes end with it.

    Its last line of output is what the episode is worth if it is a number or an object of JSON with a "score" (or
    "reward"); otherwise a request to `/reward`, or reward.function, says it.
    """

    command: ClassVar[tuple[str, ...]]
    output = ""

    async def run(self, session: AgentSession, row: Mapping[str, Any]) -> float | Mapping[str, Any] | None:
        """Run the command to its end. Raises CommandError if its exit status is not 0."""
        own = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **own},
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.gather(self._read(process), _write(process, json.dumps(dict(row)).encode()))
            status = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status:
            how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            raise CommandError(f"the command {how}; its output ends with: {output[-500:]!r}")
        return reward_in(output)

    async def _read(self, process: asyncio.subprocess.Process) -> str:
        """Return the last part of what the process prints, until the process has exited."""
        assert process.stdout is not None
        kept, ended = bytearray(), asyncio.ensure_future(process.wait())
        try:
            while True:
                reading = asyncio.ensure_future(process.stdout.read(CHUNK))
                await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():  # a process that it has left behind may hold its output open
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                chunk = await reading
                if not chunk:
                    return self.output
                kept += chunk
                del kept[: -4 * MAX_OUTPUT]
                self.output = kept.decode("utf-8", "replace")[-MAX_OUTPUT:]
        finally:
            ended.cancel()


async def _write(process: asyncio.subprocess.Process, contents: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # it need not read the row
        process.stdin.write(contents)
        await process.stdin.drain()
        process.stdin.close()


def reward_in(output: str) -> float | Mapping[str, Any] | None:
    """Return the reward in the last line of an output; None if there is none."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and "score" not in value and "reward" in value:
        value = {"score": value.pop("reward"), **value}
    if isinstance(value, dict):
        return value if "score" in value else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def make(command: str) -> type[CommandAgent]:
    """Return the agent of a command. Raises EnvironmentConfigError for a line that cannot be read as one."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise EnvironmentConfigError(f"the command {command!r} cannot be read: {error}; check its quotes.") from error
    if not words:
        raise EnvironmentConfigError("'command:' names no command; write 'command:python agent.py'.")
    return type("CommandAgent", (CommandAgent,), {"command": tuple(words)})
