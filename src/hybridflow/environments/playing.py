"""One episode, from its first prompt to its reward: an engine's turns in, prompts of the next turns out.

begin(row) ──> prompt ──> engine ──> take(tokens) ──> prompt ──> ... ──> take(tokens) ──> None ──> finish()
"""

import asyncio
import inspect
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.environments.environment import (
    METHODS,
    CalledTool,
    Done,
    EndReason,
    Environment,
    Episode,
    Turn,
)
from hybridflow.environments.episode_tokens import EpisodeRow
from hybridflow.environments.messages import AssistantTurn, Message, ToolCall
from hybridflow.environments.rendering import ChatRenderer, NextPrompt
from hybridflow.environments.tools import Tool, tool_of, tools_of
from hybridflow.errors import EnvironmentConfigError, HybridFlowError, ToolError


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of an episode: turns, sampled tokens, seconds; of a call: seconds and characters of its result."""

    turns: int = 8
    tokens: int = 4096
    seconds: float = math.inf
    call_seconds: float = 30.0
    result_chars: int = 20_000


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that has ended: its rows of tokens, and its rewards by name, none after an error."""

    episode: Episode
    rows: list[EpisodeRow]
    rewards: dict[str, float]


class Player:
    """Plays one episode of an environment. Errors of the environment end the episode, and are in its `error`."""

    def __init__(
        self,
        environment: Environment,
        renderer: ChatRenderer,
        stop_ids: Sequence[int],
        limits: EpisodeLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(environment).reward is Environment.reward:
            raise EnvironmentConfigError(
                f"{type(environment).__name__} has no method `reward`, so no episode of it has a score; write one."
            )
        self._environment, self._renderer, self._stop_ids = environment, renderer, stop_ids
        self._limits, self._clock, self._started = limits, clock, clock()
        self._tools = tools_of(environment, METHODS)
        self.rows: list[EpisodeRow] = []
        self.episode = Episode({})
        self._prompt = NextPrompt([], "")
        self._bonus = 0.0

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the model has made so far, also the position of the next one's noise."""
        return sum(map(sum, (row.is_sampled for row in self.rows)))

    @property
    def room(self) -> int:
        """The number of tokens that the next turn may have."""
        return self._limits.tokens - self.num_sampled

    async def begin(self, row: Mapping[str, Any]) -> list[int] | None:
        """Return the prompt of the first turn; None if the environment failed."""
        self.episode = Episode(row)
        messages = await self._within("reset", self._environment.reset(row))
        if messages is None:
            return None
        self.episode.messages += messages
        return self._next(lambda: self._renderer.start(self.episode.messages))

    async def take(self, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> list[int] | None:
        """Return the prompt of the next turn, None if the episode has ended; `ids` are the tokens of a turn."""
        number = len(self.episode.turns)
        self.rows[-1].add_sampled(ids, log_probs, versions, number)
        said = self._renderer.parse(ids, self._stop_ids)
        if not ids or ids[-1] not in self._stop_ids:
            self.episode.messages.append(said.message())
            self.episode.turns.append(Turn(number, said.content, said.reasoning))
            return self._end("tokens")
        called = [await self._call(call) for call in said.calls]
        turn = Turn(number, said.content, said.reasoning, tuple(called), said.malformed)
        self.episode.messages.append(said.message())
        self.episode.turns.append(turn)
        answer = await self._within("step", self._environment.step(turn))
        if answer is None:
            return None
        if isinstance(answer, Done):
            self._bonus += answer.reward
            return self._end("done")
        new = [*_results(called, said), *answer]
        if not new:
            return self._end("done")
        if len(self.episode.turns) >= self._limits.turns:
            return self._end("turns")
        if self.room < 1:
            return self._end("tokens")
        if self._clock() - self._started > self._limits.seconds:
            return self._end("seconds")
        history = list(self.episode.messages)
        self.episode.messages += new
        return self._next(lambda: self._renderer.go_on(self._prompt, ids, history, new))

    async def finish(self) -> PlayedEpisode:
        """Return the episode with its rewards: none after an error, else a `score`, which includes that of `Done`."""
        rewards: dict[str, float] = {}
        if not self.episode.error:
            found = await self._within("reward", self._environment.reward(self.episode))
            rewards = {} if found is None else self._checked_rewards(found)
        await self._within("close", self._environment.close())
        return PlayedEpisode(self.episode, self.rows, rewards)

    def _next(self, render: Callable[[], NextPrompt]) -> list[int] | None:
        """Return the whole context of the next turn, which goes on in the same row if the template allows."""
        try:
            self._prompt = render()
        except HybridFlowError as error:
            return self._fail(str(error))
        if self._prompt.is_new_row or not self.rows:
            self.rows.append(EpisodeRow(self._prompt.ids))
        else:
            self.rows[-1].add_messages(self._prompt.ids, len(self.episode.turns) - 1)
        return self.rows[-1].context

    async def _call(self, call: ToolCall) -> CalledTool:
        """Return the result of a call: what is wrong with it is a text for the model."""
        try:
            tool = tool_of(self._tools, call)
            arguments = tool.arguments(call)
        except ToolError as error:
            return CalledTool(call, f"error: {error}", is_error=True)
        try:
            async with asyncio.timeout(self._limits.call_seconds):
                result = await _run(tool, arguments)
            return CalledTool(call, self._text_of(result, tool.name))
        except TimeoutError:
            return CalledTool(
                call, f"error: {call.name} took longer than {self._limits.call_seconds:g} s", is_error=True
            )
        except ToolError as error:
            return CalledTool(call, f"error: {error}", is_error=True)
        except Exception as error:  # of the user's tool
            return CalledTool(call, f"error: {type(error).__name__}: {str(error)[:500]}", is_error=True)

    def _text_of(self, result: object, name: str) -> str:
        text = result if isinstance(result, str) else None
        if text is None:
            try:
                text = json.dumps(result, ensure_ascii=False)
            except (TypeError, ValueError) as error:
                raise ToolError(f"{name} returned a {type(result).__name__}, not a text or a value of JSON") from error
        if len(text) > self._limits.result_chars:
            raise ToolError(f"the result of {name} has {len(text):,} characters; at most {self._limits.result_chars:,}")
        return text

    def _checked_rewards(self, found: object) -> dict[str, float]:
        given = found if isinstance(found, Mapping) else {"score": found}
        rewards = {}
        for name, value in given.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                self._fail(f"reward returned {name}={value!r:.100}; expected a finite number, or several by name")
                return {}
            rewards[str(name)] = float(value)
        if "score" not in rewards:
            self._fail(
                f"reward returned {', '.join(rewards) or 'nothing'}, but no 'score', which is what is learned from"
            )
            return {}
        rewards["score"] += self._bonus
        return rewards

    async def _within(self, what: str, awaitable: Awaitable[Any]) -> Any:
        """Return what a method of the environment returns; None, with the error in the episode, if it raised."""
        try:
            async with asyncio.timeout(self._limits.call_seconds):
                return await awaitable
        except TimeoutError:
            self._fail(f"{what} took longer than {self._limits.call_seconds:g} s")
        except Exception as error:  # of the user's environment
            self._fail(f"{what} raised {type(error).__name__}: {str(error)[:500]}")
        return None

    def _end(self, reason: EndReason) -> None:
        self.episode.ended = reason

    def _fail(self, error: str) -> None:
        self.episode.ended, self.episode.error = "error", self.episode.error or error


async def _run(tool: Tool, arguments: dict[str, Any]) -> Any:
    """Run a tool; one that is not `async` in a thread, so that others go on meanwhile."""
    if inspect.iscoroutinefunction(tool.function):
        return await tool.function(**arguments)
    return await asyncio.to_thread(tool.function, **arguments)


def _results(called: Sequence[CalledTool], said: AssistantTurn) -> list[Message]:
    """Return the results of calls as messages, and what is wrong with calls that could not be read."""
    results: list[Message] = [{"role": "tool", "name": each.call.name, "content": each.result} for each in called]
    results += [{"role": "tool", "name": "error", "content": f"error: {reason}"} for reason in said.malformed]
    return results
