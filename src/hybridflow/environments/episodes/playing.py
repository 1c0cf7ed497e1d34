"""One episode, from its first prompt to its reward: an engine's turns in, prompts of the next turns out.

start(row) ──> turn ──> engine ──> deliver(tokens) ──> next_turns() ──> turn ──> engine ──> ... ──> none ──> finish()
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridflow.data.chat_prompts import is_begun
from hybridflow.data.turn_rendering import NextPrompt
from hybridflow.environments.episodes.answers import Answer, Begin, Failure, Finish, Question, TakeTurn
from hybridflow.environments.episodes.environment import EndReason, Episode, Turn
from hybridflow.environments.episodes.episode_tokens import EpisodeRow
from hybridflow.environments.episodes.messages import AssistantTurn
from hybridflow.environments.episodes.rendering import ChatRenderer
from hybridflow.errors import HybridFlowError
from hybridflow.rollout import Completion

Ask = Callable[[Question], Awaitable[Answer]]
"""Asks the environment of an episode."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of an episode: turns, rows, tokens of a row after its prompt, and tokens of a whole row.

    `prompt_tokens`: those of the first prompt, a longer one is a failure; None: as `context_tokens`.
    """

    turns: int = 8
    tokens: int = 4096
    context_tokens: int = 8192
    rows: int = 8
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that has ended: its rows of tokens, and its rewards by name, none after a `failure`.

    `bonus` is the sum of the rewards of turns, and that of `group_rewards`; it is added to the score. `output`: what a
    command has printed.
    """

    episode: Episode
    rows: list[EpisodeRow]
    rewards: Mapping[str, Any] = field(default_factory=dict)
    bonus: float = 0.0
    failure: Failure | None = None
    num_first_messages: int = 0
    output: str = ""


@dataclass(frozen=True)
class NextTurn:
    """A turn that an engine is to sample: the tokens before it, and how many it may have.

    Its noise follows from the key of the episode, the words `noise` and the position `offset` of its first token.
    `keep`, `total_tokens`: see `Request`. `own`: what the player knows of it. `is_wanted` returns whether it still
    waits for the turn.
    """

    context: list[int]
    room: int
    keep: bool
    total_tokens: int
    offset: int = 0
    noise: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    own: Any = None
    is_wanted: Callable[[], bool] = lambda: True


class EpisodePlayer(Protocol):
    """A player of one episode, which asks for the model's turns and receives them."""

    async def start(self, row: Mapping[str, Any]) -> list[NextTurn]:
        """Return the first turns; none if the episode has ended."""
        ...

    def deliver(self, turn: NextTurn, completion: Completion) -> None:
        """Get a turn; called on the event loop."""

    async def next_turns(self) -> list[NextTurn]:
        """Return the turns that follow from what was delivered; none if the episode has ended.

        With `is_parallel` also those that are asked for while others are sampled.
        """
        ...

    async def finish(self) -> "PlayedEpisode":
        """Return the episode with its rewards: none after a failure."""
        ...

    def abandon(self) -> None:
        """End what runs beside these coroutines, which are cancelled; called on the event loop."""

    is_parallel: bool
    """Whether several turns may be sampled at a time."""


class Player:
    """Plays one episode of an environment. A failure of the environment ends it, and is in `Episode.error`."""

    is_parallel = False

    def __init__(self, ask: Ask, renderer: ChatRenderer, stop_ids: Sequence[int], limits: EpisodeLimits) -> None:
        self._ask, self._renderer, self._stop_ids, self._limits = ask, renderer, stop_ids, limits
        self.rows: list[EpisodeRow] = []
        self.episode = Episode({})
        self.num_first_messages = 0  # of the prompt
        self._prompt = NextPrompt([], "")
        self._cut_turn: AssistantTurn | None = None
        self._failure: Failure | None = None
        self._bonus = 0.0
        self._delivered = Completion(0, 0)

    def abandon(self) -> None:
        """Nothing else runs."""

    async def start(self, row: Mapping[str, Any]) -> list[NextTurn]:
        """Return the first turn; nothing if the environment failed."""
        self.episode = Episode(row)
        answer = await self._ask(Begin(row))
        if answer.failure:
            return self._fail(answer.failure, answer.error)
        self.episode.messages += answer.messages
        self.num_first_messages = len(answer.messages) - is_begun(answer.messages)
        return self._next(lambda: self._renderer.start(self.episode.messages))

    def deliver(self, turn: NextTurn, completion: Completion) -> None:
        """Get the turn."""
        self._delivered = completion

    async def next_turns(self) -> list[NextTurn]:
        """Return the turn after the one that was delivered; nothing if the episode has ended.

        A turn without a stop token at its end was cut, unless it has stopped at a stop string.
        """
        got, ids = self._delivered, self._delivered.token_ids
        self.rows[-1].add_sampled(ids, got.log_probs, got.versions, len(self.episode.turns))
        self.rows[-1].add_routes(got.routes)
        messages = self.episode.messages
        begun = messages[-1].get("content") if is_begun(messages) else None
        said = self._renderer.parse(ids, self._stop_ids, self._prompt.text, begun or "")
        ends_with_token = bool(ids) and ids[-1] in self._stop_ids
        if not ids or not (ends_with_token or got.finish_reason == "stop"):
            self._cut_turn = said
            self._note(said, Answer())
            return self._end("tokens")
        answer = await self._ask(TakeTurn(said))
        self._note(said, answer)
        self.rows[-1].add_reward(answer.reward)
        self._bonus += answer.reward
        if answer.failure:
            return self._fail(answer.failure, answer.error)
        if answer.is_done:
            return self._end("done")
        if len(self.episode.turns) >= self._limits.turns:
            return self._end("turns")
        if answer.is_late:
            return self._end("seconds")
        history, new = list(self.episode.messages), list(answer.messages)
        self.episode.messages += new
        return self._next(
            lambda: self._renderer.go_on(self._prompt, ids, history, new, ends_with_token=ends_with_token)
        )

    async def finish(self) -> PlayedEpisode:
        """Return the episode with its rewards: none after a failure."""
        answer = await self._ask(Finish(self.episode.ended or "error", self._cut_turn))
        if answer.failure:
            self._fail(answer.failure, answer.error)
        rewards = {} if self._failure else dict(answer.rewards or {})
        return PlayedEpisode(self.episode, self.rows, rewards, self._bonus, self._failure, self.num_first_messages)

    def _note(self, said: AssistantTurn, answer: Answer) -> None:
        turn = Turn(len(self.episode.turns), said.content, said.reasoning, answer.called, said.malformed)
        said.add_to(self.episode.messages)
        self.episode.turns.append(turn)

    def _next(self, render: Callable[[], NextPrompt]) -> list[NextTurn]:
        """Return the next turn, which goes on in the same row if the template allows."""
        try:
            self._prompt = render()
        except HybridFlowError as error:
            return self._fail("raised", str(error))
        new, most = self._prompt.ids, self._limits.prompt_tokens
        if not self.rows and most is not None and len(new) > most:
            return self._fail(
                "raised",
                f"the first prompt has {len(new)} tokens, with the schemas of tools, more than "
                f"data.max_prompt_length={most}; raise the limit",
            )
        if self._prompt.is_new_row or not self.rows:
            if self._room(len(new), 0) < 1:
                return self._end("tokens")
            if len(self.rows) >= self._limits.rows:
                return self._end("rows")
            self.rows.append(EpisodeRow(new))
        else:
            row = self.rows[-1]
            if self._room(row.num_tokens + len(new), len(row.ids) + len(new)) < 1:
                return self._end("tokens")
            row.add_messages(new, len(self.episode.turns) - 1)
        row, limits = self.rows[-1], self._limits
        may_go_on = len(self.episode.turns) + 1 < limits.turns
        most = min(limits.context_tokens, len(row.prompt_ids) + limits.tokens) if may_go_on else 0
        num_sampled = sum(each.num_sampled for each in self.rows)  # also the position of the next token's noise
        return [NextTurn(row.context, self._room(row.num_tokens, len(row.ids)), may_go_on, most, num_sampled)]

    def _room(self, context: int, after_prompt: int) -> int:
        """Return how many tokens may follow `context` tokens of a row, of which so many are after its prompt."""
        return min(self._limits.context_tokens - context, self._limits.tokens - after_prompt)

    def _end(self, reason: EndReason) -> list[NextTurn]:
        self.episode.ended = reason
        return []

    def _fail(self, failure: Failure, error: str) -> list[NextTurn]:
        self.episode.ended, self.episode.error = "error", self.episode.error or error
        self._failure = self._failure or failure
        return []
