"""An agent that is a command of any language: it gets the row on standard input, the address in its environment."""

import asyncio
import json
import math
import os
import shlex
import shutil
from collections.abc import Mapping
from typing import Any, ClassVar

from hybridflow.environments.agents.agent import Agent, AgentSession
from hybridflow.environments.sandbox import Program
from hybridflow.errors import EnvironmentConfigError

MAX_OUTPUT = 20_000
"""Characters of the output of a command that are kept: the last ones."""


class CommandError(Exception):
    """A command that has failed."""


class CommandAgent(Agent):
    """Runs a command for each episode, in a session of its own, whose processes end with it.

    Its last line of output is what the episode is worth if it is a number or an object of JSON with a "score" (or
    "reward"); otherwise a request to `/reward`, or reward.function, says it.
    """

    command: ClassVar[tuple[str, ...]]
    _program: Program | None = None

    @property
    def output(self) -> str:
        """The last part of what the command has printed so far."""
        return self._program.kept[1].decode("utf-8", "replace")[-MAX_OUTPUT:] if self._program else ""

    async def run(self, session: AgentSession, row: Mapping[str, Any]) -> float | Mapping[str, Any] | None:
        """Run the command to its end. Raises CommandError if its exit status is not 0."""
        own = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
        }
        options = {"env": {**os.environ, **own}, "stderr": asyncio.subprocess.STDOUT}
        program = self._program = await Program.start(self.command, options, 4 * MAX_OUTPUT, head=0)
        try:
            await program.wait(math.inf, json.dumps(dict(row)).encode())
        finally:
            program.kill()  # also what it has left running
        if status := program.exit_code:
            how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
            raise CommandError(f"the command {how}; its output ends with: {self.output[-500:]!r}")
        return reward_in(self.output)


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
    """Return the agent of a command. Raises EnvironmentConfigError if it cannot be read or there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise EnvironmentConfigError(f"the command {command!r} cannot be read: {error}; check its quotes.") from error
    if not words:
        raise EnvironmentConfigError("'command:' names no command; write 'command:python agent.py'.")
    if not shutil.which(words[0]):
        raise EnvironmentConfigError(f"{words[0]!r} is not a program on PATH or an executable file (chmod +x).")
    return type("CommandAgent", (CommandAgent,), {"command": tuple(words)})
