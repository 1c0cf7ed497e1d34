"""One environment and its tools: answers the questions of an episode, whatever the user's code does."""

import asyncio
import copy
import inspect
import json
import math
import numbers
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
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
from hybridflow.environments.episodes.environment import METHODS, CalledTool, Done, Environment, Episode, Reply, Turn
from hybridflow.environments.episodes.messages import AssistantTurn, Message, ToolCall
from hybridflow.environments.episodes.tools import Tool, tool_of, tools_of
from hybridflow.environments.processes.episode_reward import EpisodeReward
from hybridflow.environments.processes.reward_process import as_message, described, returns_awaitable
from hybridflow.errors import EnvironmentConfigError, ToolError

MAX_RESULT_CHARS = 20_000
"""Longest result of a tool that a model reads; a longer one is an error that says so."""

CONCURRENT_CALLS = 32

CANCEL_S = 0.1
"""Seconds in which a call that took too long may clean up."""


@dataclass(frozen=True)
class CallLimits:
    """Seconds of each call of the user's code (None: no limit), and how many run at a time.

    `agent_seconds`: those of a whole episode of an agent.
    """

    seconds: float | None = 60.0
    concurrency: int = CONCURRENT_CALLS
    agent_seconds: float | None = 600.0


_OwnLimit = tuple[float | None, Callable[[], Awaitable[float]]]
"""The seconds of a call, and what says how many it has waited."""


class _FailedError(Exception):
    """A method of the environment has failed."""

    def __init__(self, failure: Failure, error: str) -> None:
        super().__init__(error)
        self.failure: Failure = failure


class EnvironmentHost:
    """An object of the user's class, made by `make`; errors of its methods are answers with `failure`.

    `slots` bounds the calls of all hosts that share it. `scored_by` scores the episodes of a class without `reward`.
    `num_stuck` counts the calls in threads, of all hosts of the process, that were given up but still run. Raises
    EnvironmentConfigError for a tool without a schema.
    """

    num_stuck = 0

    def __init__(
        self,
        make: Callable[[], Environment],
        limits: CallLimits,
        slots: asyncio.Semaphore | None = None,
        scored_by: EpisodeReward | None = None,
    ) -> None:
        self._make, self._limits, self._scored_by = make, limits, scored_by
        self._slots = slots or asyncio.Semaphore(limits.concurrency)
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
        except _FailedError as failed:
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
            raise _FailedError("raised", "reset returned no messages; expected at least one")
        self._episode.messages += messages
        return messages

    async def _made(self) -> Environment:
        environment = self._environment
        if environment is None:
            environment = self._environment = await self._within(self._name, self._make)
            self._tools = _tools_of(environment)
        return environment

    async def _run_agent(self, question: RunAgent) -> Answer:
        agent, session = await self._made(), AgentSession(question.base_url, question.api_key)
        assert isinstance(agent, Agent)
        row = copy.deepcopy(question.row)
        failure: Failure | None = None
        error, rewards = "", None
        try:
            own = self._limits.agent_seconds, lambda: _run(seconds_waited, {"session": session}, "waited")
            found = await self._within("the agent", lambda: agent.run(session, row), own)
            rewards = None if found is None else _rewards_of("the agent", found)
        except _FailedError as failed:
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
            if isinstance(environment, Agent) and not scores_groups(type(environment)):
                printed = str(getattr(environment, "output", ""))[-200:]
                found = f" (its output ends with {printed!r})" if printed else ""
                how = "return a number, print it as the last line of a command, or set reward.function"
                raise _FailedError("raised", f"the agent gave no reward{found}; {how}")
            return {"score": 0.0}  # `group_rewards` is added
        found = await self._within(
            "reward.function", lambda: _run(scored_by.function, scored_by.arguments(self._episode), "reward.function")
        )
        plain = as_message(found, inside=True)
        return _rewards_of("reward.function", plain.get("mapping", {"score": plain.get("result")}))

    async def _score_group(self, episodes: Sequence[Episode]) -> Answer:
        environment = await self._made()
        try:
            found = await self._within("group_rewards", lambda: environment.group_rewards(episodes))
            if not isinstance(found, Sequence) or len(found) != len(episodes):
                shown = repr(found)[:200]
                raise _FailedError("raised", f"group_rewards returned {shown}; expected {len(episodes)} numbers")
            return Answer(group=tuple(_number_of("group_rewards", value) for value in found))
        finally:
            await self._within("close", environment.close)

    async def _call(self, call: ToolCall) -> CalledTool:
        """Return the result of a call: what is wrong with it is a text for the model."""
        try:
            tool = tool_of(self._tools, call)
            arguments = tool.arguments(call)
            result = await self._limited(call.name, lambda: _run(tool.function, arguments, tool.name))
            return CalledTool(call, _text_of(result, tool.name))
        except (ToolError, _FailedError) as error:
            return CalledTool(call, as_unicode(f"error: {error}"), is_error=True)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of the user's tool, also SystemExit
            return CalledTool(call, f"error: {type(error).__name__}: {_shown(error)}", is_error=True)

    async def _within(self, what: str, call: Callable[[], Any], own: _OwnLimit | None = None) -> Any:
        """Return what a method of the environment returns. Raises _FailedError if it raises or takes too long."""
        try:
            return await self._limited(what, call, own)
        except (_FailedError, asyncio.CancelledError):
            raise
        except EnvironmentConfigError as error:
            raise _FailedError("raised", str(error)) from error
        except MemoryError as error:
            raise _FailedError("memory", f"{what} raised MemoryError: {_shown(error)}") from error
        except BaseException as error:  # of the user's environment, also SystemExit
            raise _FailedError("raised", f"{what} raised {described(error, self._make)}") from error

    async def _limited(self, what: str, call: Callable[[], Any], own: _OwnLimit | None = None) -> Any:
        """Return what a call returns, `async` or not, in a task of its own, which may ignore that it is cancelled.

        A call with a limit of its own takes no slot, and may wait for others: those seconds do not count.
        """
        limit, waited = own or (self._limits.seconds, None)
        async with nullcontext() if own else self._slots:
            task, began = asyncio.ensure_future(_outcome(call)), time.monotonic()
            try:
                await asyncio.wait({task}, timeout=limit)
                while waited and limit and not task.done():
                    left = limit + await waited() - (time.monotonic() - began)
                    if left <= 0:
                        break
                    await asyncio.wait({task}, timeout=left)
            finally:
                is_late = not task.done()
                task.cancel()
            if is_late:
                await asyncio.wait({task}, timeout=CANCEL_S)
                if not task.done():
                    EnvironmentHost.num_stuck += 1
                    task.add_done_callback(_one_less_is_stuck)
                limited = f"agent.timeout_s={limit:g}" if own else f"{limit:g} s"
                raise _FailedError("timeout", f"{what} took longer than {limited}")
            value, error = task.result()
            if isinstance(error, asyncio.CancelledError):  # by the user's code
                raise _FailedError("raised", f"{what} was cancelled: asyncio.CancelledError") from error
            if error is not None:
                raise error
            return value

    @property
    def _name(self) -> str:
        return getattr(self._make, "__name__", "the environment")


def require_environment(environment: type[Environment], name: str) -> None:
    """Raise EnvironmentConfigError unless this is a class of environments."""
    if not isinstance(environment, type) or not issubclass(environment, Environment):
        raise EnvironmentConfigError(
            f"'{name}' does not name a subclass of hybridflow.environments.Environment; derive the class from it."
        )


def require_rewards(environment: type[Environment], reward_function: str) -> None:
    """Raise EnvironmentConfigError unless either the class or reward.function says what an episode is worth.

    An agent may also say it itself.
    """
    name, has_reward = environment.__name__, environment.reward is not Environment.reward
    if has_reward and reward_function:
        raise EnvironmentConfigError(
            f"{name} has a method `reward`, and reward.function={reward_function!r} is set: both give the rewards; "
            "remove one of them (a `reward` may call the function)."
        )
    if not (has_reward or reward_function or scores_groups(environment) or issubclass(environment, Agent)):
        raise EnvironmentConfigError(
            f"{name} has no method `reward`, so no episode of it has a score; write one, or set reward.function."
        )


def scores_groups(environment: type[Environment]) -> bool:
    """Return whether the class compares the episodes of a prompt."""
    return environment.group_rewards is not Environment.group_rewards


@dataclass(frozen=True)
class EnvironmentKind:
    """A class of environments: the schemas of its tools, whether it compares the episodes of a prompt, and its source.

    `source` is a digest of the files that define the class and its reward function; empty if there is none.
    """

    name: str
    schemas: tuple[Mapping[str, Any], ...]
    scores_groups: bool
    source: str
    is_agent: bool = False

    @classmethod
    def of(
        cls, environment: type[Environment], name: str, source: str = "", scored_by: EpisodeReward | None = None
    ) -> "EnvironmentKind":
        """Return the kind of a class, whose episodes `scored_by` scores if it has no `reward`.

        Raises EnvironmentConfigError if there is no reward, or there are two, or a tool has no schema.
        """
        require_environment(environment, name)
        require_rewards(environment, scored_by.name if scored_by else "")
        tools = _tools_of(object.__new__(environment))  # types and docstrings do not depend on the object
        schemas = tuple(tool.schema() for tool in tools.values())
        source += scored_by.source if scored_by else ""
        return cls(name, schemas, scores_groups(environment), source, issubclass(environment, Agent))

    def to_message(self) -> dict[str, Any]:
        """Return the kind as values of JSON."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> "EnvironmentKind":
        """Return the kind that `to_message` has written."""
        return cls(
            str(message["name"]),
            tuple(message["schemas"]),
            bool(message["scores_groups"]),
            str(message["source"]),
            bool(message["is_agent"]),
        )


def _tools_of(environment: Environment) -> dict[str, Tool]:
    return {} if isinstance(environment, Agent) else tools_of(environment, METHODS)


async def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what a call returns or raises: SystemExit raised in a task would end the event loop."""
    try:
        value = call()
        return (await value if inspect.isawaitable(value) else value), None
    except BaseException as error:  # of the user's code
        return None, error


def _one_less_is_stuck(_: object) -> None:
    EnvironmentHost.num_stuck -= 1


async def _run(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> Any:
    """Return what a function returns; one that is not `async` has a thread, so that others go on if it never ends."""
    if returns_awaitable(function):
        found = function(**arguments)
        return await found if inspect.isawaitable(found) else found
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def run() -> None:
        try:
            value, error = function(**arguments), None
        except BaseException as raised:  # of the user's function
            value, error = None, raised
        with suppress(RuntimeError):  # the loop is closed: the run has ended
            loop.call_soon_threadsafe(_settle, outcome, value, error)

    threading.Thread(target=run, daemon=True, name=name).start()
    try:
        value, error = await outcome
    except asyncio.CancelledError:  # it took too long
        EnvironmentHost.num_stuck += 1
        raise
    if error is not None:
        raise error
    return value


def _settle(outcome: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if outcome.done():
        EnvironmentHost.num_stuck -= 1
    else:
        outcome.set_result((value, error))


def _shown(error: BaseException) -> str:
    try:
        return as_unicode(str(error)[:500])
    except BaseException as problem:  # a user's class may raise anything
        return f"an exception whose text is missing: __str__ raised {type(problem).__name__}"


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
        raise _FailedError("raised", wrong)
    messages = []
    for each in value:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise _FailedError("raised", wrong)
        try:
            text = json.dumps(dict(each), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _FailedError("raised", wrong) from error
        messages.append(json.loads(as_unicode(text)))
    return tuple(messages)


def _number_of(what: str, value: object) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise _FailedError("raised", f"{what} returned the reward {value!r:.100}; expected a finite number")
    return float(value)


def _rewards_of(what: str, found: object) -> dict[str, Any]:
    try:
        return rewards_of(found)
    except ValueError as error:
        raise _FailedError("raised", f"{what} returned {error}") from error


def _results(called: Sequence[CalledTool], said: AssistantTurn) -> list[Message]:
    """Return the results of calls as messages, and what is wrong with calls that could not be read."""
    results: list[Message] = [{"role": "tool", "name": each.call.name, "content": each.result} for each in called]
    results += [{"role": "tool", "name": "error", "content": f"error: {reason}"} for reason in said.malformed]
    return results
