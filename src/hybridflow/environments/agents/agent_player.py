"""Plays the episode of an agent: its requests are turns for the engine, what it returns is the reward.

An episode that has ended is in the journal of the step: what was asked, after which answers, and the outcome. A step
that is repeated acts it out without the agent, as long as the model says the same; otherwise the agent runs again.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from hybridflow.environments.agents.chat import ChatReply, ChatRequest, RefusedError
from hybridflow.environments.agents.session import Session
from hybridflow.environments.agents.turn_tree import TreeTurn
from hybridflow.environments.episodes.answers import Answer, Finish, RunAgent
from hybridflow.environments.episodes.environment import CalledTool, Episode, Turn
from hybridflow.environments.episodes.playing import NextTurn, PlayedEpisode
from hybridflow.environments.processes.environment_pool import AskAgent, failure_of
from hybridflow.environments.processes.user_process import LostError
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.environments.rewards.outcome import Outcome
from hybridflow.errors import RewardError
from hybridflow.rollout import Completion

if TYPE_CHECKING:
    from hybridflow.environments.agents.endpoint import Endpoint


class _DivergedError(Exception):
    """The model said something else than in the journal, or the agent failed and shall run again."""


class AgentPlayer:
    """Plays one episode of an agent, see `EpisodePlayer`; `key` names the episode in the journal.

    `ask` asks the agent in its process. With `only_last`, turns that the newest conversation does not have are not
    trained.
    """

    is_parallel = True

    def __init__(
        self,
        ask: AskAgent,
        make_session: Callable[[], Session],
        endpoint: "Endpoint",
        *,
        only_last: bool = False,
        key: Sequence[int] = (),
        journal: RewardJournal | None = None,
    ) -> None:
        self._ask, self._make_session, self._endpoint, self._only_last = ask, make_session, endpoint, only_last
        self._key, self._journal = list(key), journal
        self._row: Mapping[str, Any] = {}
        self._session: Session | None = None
        self._agent: asyncio.Task[Answer] | None = None

    async def start(self, row: Mapping[str, Any]) -> list[NextTurn]:
        """Start the agent; return its first turns."""
        self._row, self._session = row, self._make_session()
        self._agent = asyncio.create_task(self._play(self._session))
        return await self.next_turns()

    def deliver(self, turn: NextTurn, completion: Completion) -> None:
        """Answer the request of a turn."""
        assert self._session is not None
        self._session.deliver(turn.own, completion)

    async def next_turns(self) -> list[NextTurn]:
        """Return the turns that the agent has asked for; none when it has ended."""
        assert self._session is not None
        return [_next_turn(turn) for turn in await self._session.next_turns()]

    def abandon(self) -> None:
        """End the agent."""
        if self._agent:
            self._agent.cancel()

    async def finish(self) -> PlayedEpisode:
        """Return the episode with its rewards: none after a failure."""
        session, agent = self._session, self._agent
        assert session is not None
        assert agent is not None
        answer = await agent
        self._session = None  # its turns are large
        rows, (_, num_first) = session.tree.rows(only_last=self._only_last), session.tree.messages()
        rewards = {} if answer.failure else answer.rewards or {}
        episode = self._episode(session, answer)
        return PlayedEpisode(episode, rows, rewards, 0.0, answer.failure, num_first, answer.output)

    def _episode(self, session: Session, answer: Answer) -> Episode:
        messages, _ = session.tree.messages()
        ended = "error" if answer.failure else session.limit or "done"
        return Episode(self._row, messages, _turns(session.tree.kept), ended, answer.error)

    async def _play(self, session: Session) -> Answer:
        """Act the episode out as the journal has it, or let the agent play it; end the session."""
        call = None
        try:
            if self._journal:
                call = self._journal.call({"episode": self._key, "agent": dict(self._row)}, None)
                if call.known:
                    with suppress(_DivergedError):
                        return await _act_out(session, call.known, self._journal)
                    session.restart()
            answer = await self._scored(session, await self._run(session))
            if self._journal and call:
                script = {
                    "events": [*_shortened(session.events)],
                    "limit": session.limit,
                    "answer": answer.to_message(),
                }
                self._journal.write(call, Outcome(json.dumps(script)), is_answer=answer.failure is None)
            return answer
        finally:
            session.end()

    async def _run(self, session: Session) -> Answer:
        """Return the answer of the agent, which starts again if its process is lost, with another address and key."""

        async def run(is_alone: bool) -> Answer:
            if is_alone:
                session.restart()
            session_id = secrets.token_hex(8)
            self._endpoint.sessions[session_id] = session
            try:
                address = f"{self._endpoint.base_url}/{session_id}/v1"
                return await self._ask(RunAgent(self._row, address, session.key), is_alone)
            finally:
                await self._endpoint.remove(session_id)

        return await _asked(run)

    async def _scored(self, session: Session, answer: Answer) -> Answer:
        """Return the answer with what the episode is worth, if the agent has not said it. Nothing is asked any more.

        An agent that fails after a limit has refused a request has ended at the limit, if another one says the reward.
        """
        session.end()
        has_turn = bool(session.tree.kept)
        is_cut = answer.failure == "raised" and session.limit is not None and has_turn
        if answer.failure and not is_cut:
            return answer
        if not has_turn:
            why = f"its last request was refused: {session.refused}" if session.refused else "it must use its address"
            return replace(answer, failure="raised", error=f"the agent ended without a turn of the model; {why}")
        if answer.rewards is not None:
            return answer
        episode = self._episode(session, replace(answer, failure=None, error=""))
        finish = Finish(session.limit or "done", episode=episode, rewards=session.reward)
        scored = await _asked(lambda is_alone: self._ask(finish, is_alone))
        return answer if is_cut and scored.failure else replace(scored, output=answer.output)


async def _asked(ask: Callable[[bool], Awaitable[Answer]]) -> Answer:
    """Return an answer of the agent. If its process is lost, `ask` asks it again, alone in a process."""
    with suppress(LostError):
        return await ask(False)
    try:
        return await ask(True)
    except LostError as lost:
        return failure_of(lost)


async def _act_out(session: Session, known: Outcome, journal: RewardJournal) -> Answer:
    """Ask what the agent has asked, each after the same answers. Raises _DivergedError if one of these differs."""
    tasks: list[asyncio.Task[ChatReply]] = []
    request, got = ChatRequest(()), set[int]()
    try:
        script = json.loads(known.result)
        answer = Answer.of_message(script["answer"])
        if answer.failure and not journal.keeps_failures:
            raise _DivergedError
        for kind, *what in script["events"]:
            if kind == "ask":
                request = _request_after(request, *what)
                tasks.append(asyncio.create_task(session.complete(request)))
                await asyncio.sleep(0)
            elif kind == "got":
                reply = await tasks[what[0]]
                got.add(what[0])
                if reply.digest != what[1]:
                    raise _DivergedError
            elif tasks[what[0]].done():
                session.drop(tasks[what[0]].result().turn_id)
            else:
                tasks[what[0]].cancel()
        session.limit = script["limit"]
        return answer
    except RefusedError as error:
        raise _DivergedError from error
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise RewardError(
            f"the journal '{journal.directory}' has a row that is not an episode of an agent ({error}); remove the "
            "directory, so that agents run again."
        ) from error
    finally:
        for task in tasks:
            task.cancel()
        for number, reply in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
            if isinstance(reply, ChatReply) and number not in got:  # the agent ended without it
                session.drop(reply.turn_id)


def _shortened(events: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Yield events as values of JSON; a request is what differs from the one before, and the messages they share."""
    before = ChatRequest(())
    for kind, *what in events:
        if kind == "ask":
            (request,) = what
            pairs = zip(before.messages, request.messages, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: repr(pair[0]) == repr(pair[1]), pairs))  # 1 is not True
            other = {name: value for name, value in vars(request).items() if repr(value) != repr(getattr(before, name))}
            what, before = [shared, {**other, "messages": request.messages[shared:]}], request
        yield [kind, *what]


def _request_after(before: ChatRequest, shared: int, other: Mapping[str, Any]) -> ChatRequest:
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in other.items()}
    return replace(before, **{**given, "messages": (*before.messages[:shared], *given["messages"])})


def _next_turn(turn: TreeTurn) -> NextTurn:
    return NextTurn(
        turn.context,
        turn.max_tokens,
        True,
        turn.most_tokens,
        noise=turn.noise,
        stop_strings=turn.request.stop,
        own=turn,
        is_wanted=lambda: not turn.is_dropped,
    )


def _turns(kept: Sequence[TreeTurn]) -> list[Turn]:
    """Return the turns of an episode, with the results of their calls that the agent has given the model."""
    turns, first_after = [], {id(turn.parent): turn for turn in reversed(kept)}
    for number, turn in enumerate(kept):
        assert turn.reply is not None
        said, results = turn.reply.said, list[str]()
        if following := first_after.get(id(turn)):
            after = following.request.messages[turn.position + 1 :]
            results = [str(message.get("content")) for message in after if message["role"] == "tool"]
        called = [
            CalledTool(call, results[place] if place < len(results) else "") for place, call in enumerate(said.calls)
        ]
        turns.append(Turn(number, said.content, said.reasoning, tuple(called)))
    return turns
