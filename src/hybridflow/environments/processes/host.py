"""One environment and its tools: answers the questions of an episode, whatever the user's code does."""

import asyncio
import copy
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.environments.agents.agent import Agent, AgentSession, seconds_waited
from hybridflow.environments.episodes.answers import (
    Answer,
    Begin,
    Failure,
    Finish,
    Question,
    RunAgent,
    ScoreGroup,
    TakeTurn,
    as_unicode,
    rewards_of,
)
from hybridflow.environments.episodes.environment import CalledTool, Done, Environment, Episode, Reply, Turn
from hybridflow.environments.episodes.messages import AssistantTurn, Message, ToolCall
from hybridflow.environments.episodes.tools import Tool, tool_of, tools_of
from hybridflow.environments.processes.arguments import LoadedReward
from hybridflow.environments.processes.limited_calls import (
    CallLimits,
    FailedError,
    LimitedCalls,
    OwnLimit,
    run_function,
)
from hybridflow.environments.processes.user_errors import described, text_of
from hybridflow.environments.rewards.outcome import as_message
from hybridflow.errors import EnvironmentConfigError, ToolError

MAX_RESULT_CHARS = 20_000
"""Longest result of a tool that a model reads; a longer one is an error that says so."""


class EnvironmentHost:
    """An object of the user's class, made by `make`; errors of its methods are answers with `failure`.

    `slots` bounds the calls of all hosts that share it. `scored_by` scores the episodes of a class without `reward`.
    Raises EnvironmentConfigError for a tool without a schema.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        limits: CallLimits,
        slots: asyncio.Semaphore | None = None,
        scored_by: LoadedReward | None = None,
    ) -> None:
        self._make, self._calls, self._scored_by = make, LimitedCalls(limits, slots), scored_by
        self._environment: Environment | None = None
        self._tools: dict[str, Tool] = {}
        self._episode = Episode({})

    async def answer(self, question: Question) -> Answer:
        """Return the answer to the next question of the episode."""
        try:
            if isinstance(question, Begin):
                return Answer(messages=await self._begin(question.row))
            if isinstance(question, TakeTurn):
                return await self._take_turn(question.said)
            if isinstance(question, ScoreGroup):
                return await self._score_group(question.episodes)
            if isinstance(question, RunAgent):
                return await self._run_agent(question)
            return await self._finish(question)
        except FailedError as failed:
            failure, error = failed.failure, as_unicode(str(failed))
        except asyncio.CancelledError:
            raise
        except BaseException as raised:  # of a value of the user's code, such as one whose `repr` fails
            failure, error = "raised", f"what it returned cannot be used: {type(raised).__name__}: {_shown(raised)}"
        self._episode.ended, self._episode.error = "error", error
        return Answer(failure=failure, error=error)

    async def _begin(self, row: Mapping[str, Any]) -> tuple[Message, ...]:
        self._episode = Episode(copy.deepcopy(row))
        environment = await self._made()
        messages = _messages_of("reset", await self._within("reset", lambda: environment.reset(self._episode.row)))
        if not messages:
            raise FailedError("raised", "reset returned no messages; expected at least one")
        self._episode.messages += messages
        return messages

    async def _made(self) -> Environment:
        environment = self._environment
        if environment is None:
            environment = self._environment = await self._within(
                getattr(self._make, "__name__", "the environment"), self._make
            )
            self._tools = {} if isinstance(environment, Agent) else tools_of(environment)
        return environment

    async def _run_agent(self, question: RunAgent) -> Answer:
        agent, session = await self._made(), AgentSession(question.base_url, question.api_key)
        assert isinstance(agent, Agent)
        row = copy.deepcopy(question.row)
        failure: Failure | None = None
        error, rewards = "", None
        try:
            own = self._calls.limits.agent_seconds, lambda: run_function(seconds_waited, {"session": session}, "waited")
            found = await self._within("the agent", lambda: agent.run(session, row), own)
            rewards = None if found is None else _rewards_of("the agent", found)
        except FailedError as failed:
            failure, error = failed.failure, as_unicode(str(failed))
        if failure or rewards is not None:  # otherwise `Finish` follows
            await self._within("close", agent.close)
        output = as_unicode(str(getattr(agent, "output", "")))
        return Answer(is_done=True, rewards=rewards, failure=failure, error=error, output=output)

    async def _take_turn(self, said: AssistantTurn) -> Answer:
        environment = await self._made()
        called = tuple([await self._call(call) for call in said.calls])
        turn = self._note(said, called)
        reply = await self._within("step", lambda: environment.step(turn))
        done = isinstance(reply, Done)
        reward = _number_of("step", reply.reward) if isinstance(reply, Done | Reply) else 0.0
        answered = () if done else _messages_of("step", reply.messages if isinstance(reply, Reply) else reply)
        new = () if done else (*_results(called, said), *answered)
        self._episode.messages += new
        return Answer(new, called, is_done=done or not new, reward=reward)

    def _note(self, said: AssistantTurn, called: Sequence[CalledTool] = ()) -> Turn:
        turn = Turn(len(self._episode.turns), said.content, said.reasoning, tuple(called), said.malformed)
        said.add_to(self._episode.messages)
        self._episode.turns.append(turn)
        return turn

    async def _finish(self, question: Finish) -> Answer:
        if question.cut_turn is not None:
            self._note(question.cut_turn)
        if question.episode is not None:
            self._episode, _ = question.episode, await self._made()
        environment = self._environment
        try:
            if question.ended == "error" or environment is None:
                return Answer(is_done=True)
            self._episode.ended = question.ended
            if question.rewards is not None:
                return Answer(is_done=True, rewards=question.rewards)
            return Answer(is_done=True, rewards=await self._rewards(environment))
        finally:
            if environment is not None:
                await self._within("close", environment.close)

    async def _rewards(self, environment: Environment) -> Mapping[str, Any]:
        if type(environment).reward is not Environment.reward:
            return _rewards_of("reward", await self._within("reward", lambda: environment.reward(self._episode)))
        if (scored_by := self._scored_by) is None:
            if isinstance(environment, Agent) and type(environment).group_rewards is Environment.group_rewards:
                printed = str(getattr(environment, "output", ""))[-200:]
                found = f" (its output ends with {printed!r})" if printed else ""
                how = "return a number, print it as the last line of a command, or set reward.function"
                raise FailedError("raised", f"the agent gave no reward{found}; {how}")
            return {"score": 0.0}  # `group_rewards` is added
        found = await self._within(
            "reward.function",
            lambda: run_function(scored_by.function, scored_by.arguments_for(self._episode), "reward.function"),
        )
        plain = as_message(found, inside=True)
        return _rewards_of("reward.function", plain.get("mapping", {"score": plain.get("result")}))

    async def _score_group(self, episodes: Sequence[Episode]) -> Answer:
        environment = await self._made()
        try:
            found = await self._within("group_rewards", lambda: environment.group_rewards(episodes))
            if not isinstance(found, Sequence) or len(found) != len(episodes):
                shown = repr(found)[:200]
                raise FailedError("raised", f"group_rewards returned {shown}; expected {len(episodes)} numbers")
            return Answer(group=tuple(_number_of("group_rewards", value) for value in found))
        finally:
            await self._within("close", environment.close)

    async def _call(self, call: ToolCall) -> CalledTool:
        """Return the result of a call: what is wrong with it is a text for the model."""
        try:
            tool = tool_of(self._tools, call)
            arguments = tool.arguments(call)
            result = await self._calls.run(call.name, lambda: run_function(tool.function, arguments, tool.name))
            return CalledTool(call, _text_of(result, tool.name))
        except (ToolError, FailedError) as error:
            return CalledTool(call, as_unicode(f"error: {error}"), is_error=True)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of the user's tool, also SystemExit
            return CalledTool(call, f"error: {type(error).__name__}: {_shown(error)}", is_error=True)

    async def _within(self, what: str, call: Callable[[], Any], own: OwnLimit | None = None) -> Any:
        """Return what a method of the environment returns. Raises FailedError if it raises or takes too long."""
        try:
            return await self._calls.run(what, call, own)
        except (FailedError, asyncio.CancelledError):
            raise
        except EnvironmentConfigError as error:
            raise FailedError("raised", str(error)) from error
        except BaseException as error:  # of the user's environment, also SystemExit
            failure = "memory" if isinstance(error, MemoryError) else "raised"
            raise FailedError(failure, f"{what} raised {described(error, self._make)}") from error


def _shown(error: BaseException) -> str:
    return as_unicode(text_of(error)[:500])


def _text_of(result: object, name: str) -> str:
    text = result if isinstance(result, str) else None
    if text is None:
        try:
            text = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"{name} returned a {type(result).__name__}, not a text or a value of JSON") from error
    if len(text) > MAX_RESULT_CHARS:
        raise ToolError(f"the result of {name} has {len(text):,} characters; at most {MAX_RESULT_CHARS:,}")
    return as_unicode(text)


def _messages_of(what: str, value: object) -> tuple[Message, ...]:
    """Return messages as plain values of JSON."""
    wrong = f"{what} returned {repr(value)[:200]}; expected a list of messages, each with 'role' and 'content'"
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise FailedError("raised", wrong)
    messages = []
    for each in value:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise FailedError("raised", wrong)
        try:
            text = json.dumps(dict(each), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise FailedError("raised", wrong) from error
        messages.append(json.loads(as_unicode(text)))
    return tuple(messages)


def _number_of(what: str, value: object) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise FailedError("raised", f"{what} returned the reward {value!r:.100}; expected a finite number")
    return float(value)


def _rewards_of(what: str, found: object) -> dict[str, Any]:
    try:
        return rewards_of(found)
    except ValueError as error:
        raise FailedError("raised", f"{what} returned {error}") from error


def _results(called: Sequence[CalledTool], said: AssistantTurn) -> list[Message]:
    """Return the results of calls as messages, and what is wrong with calls that could not be read."""
    results: list[Message] = [{"role": "tool", "name": each.call.name, "content": each.result} for each in called]
    results += [{"role": "tool", "name": "error", "content": f"error: {reason}"} for reason in said.malformed]
    return results
