"""One episode as its agent sees it: a key, open requests, and turns; and as the engine sees it: turns to sample."""

import asyncio
import math
import secrets
import time
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from typing import Any

from hybridflow.environments.agents.chat import ChatReply, ChatRequest, RefusedError
from hybridflow.environments.agents.turn_tree import TreeTurn, TurnTree
from hybridflow.environments.episodes.answers import rewards_of
from hybridflow.environments.episodes.environment import EndReason
from hybridflow.rollout import Completion, SamplingParams

MAX_OPEN_REQUESTS = 64
"""Requests of one agent that may be open at a time."""

MAX_GIVEN_UP = 256
"""Turns beyond `limits.turns` whose clients may go before they have them: the engine samples some to their ends."""

BODY_BYTES, BODY_BYTES_PER_TOKEN = 2**16, 64
"""Largest body of a request: a longer one cannot fit into a row, and its tokens would take long to count."""

_ENDINGS: dict[str, EndReason] = {"max_turns": "turns", "context_length_exceeded": "tokens", "max_rows": "rows"}


class Session:
    """The requests of one agent, and the turns that they wait for; used on one event loop.

    `allowed`: what a request may ask of sampling, which is the run's; None: what it likes. After `seconds` there is no
    further turn. `key` is a secret of the agent.
    """

    def __init__(
        self,
        tree: TurnTree,
        allowed: SamplingParams | None,
        seconds: float = math.inf,
        key: str = "",
    ) -> None:
        self.tree, self._allowed, self._seconds = tree, allowed, seconds
        self.max_body_bytes = BODY_BYTES + BODY_BYTES_PER_TOKEN * tree.limits.context_tokens
        self.key = key or secrets.token_urlsafe(24)
        self.reward: dict[str, Any] | None = None
        self.limit: EndReason | None = None
        """The limit that has refused a request; None: no limit has."""
        self.refused = ""
        """Why the last request that was refused was refused."""
        self.is_over = False
        self.events: MutableSequence[list[Any]] = []
        """What happened, in order: ["ask", request], ["got", number of the request, digest], ["drop", number]."""
        self._began, self._num_open, self._num_given_up, self._num_asked = time.monotonic(), 0, 0, 0
        self._new: list[TreeTurn] = []
        self._waiting: dict[TreeTurn, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._waited_s, self._waiting_since = 0.0, 0.0

    @property
    def waited_s(self) -> float:
        """Seconds in which requests of the agent have waited for turns."""
        return self._waited_s + (time.monotonic() - self._waiting_since if self._waiting else 0.0)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Count an open request. Raises RefusedError for too many, and after the end of the episode."""
        self._require_running()
        if self._num_open >= MAX_OPEN_REQUESTS:
            raise RefusedError(
                429, "too_many_requests", f"the episode has {MAX_OPEN_REQUESTS} open requests; wait for their answers."
            )
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Return the turn of a request; a turn whose client does not wait for it is not kept.

        Raises RefusedError for a request that this episode cannot serve, and if the episode ends meanwhile.
        """
        self._require_running()
        self._require_sampling(request)
        if self._num_given_up >= MAX_GIVEN_UP + self.tree.limits.turns:
            raise RefusedError(
                429, "too_many_requests", f"clients have given up {self._num_given_up} turns; let them wait for turns."
            )
        try:
            if time.monotonic() - self._began > self._seconds:
                raise RefusedError(400, "max_seconds", f"the episode has lasted {self._seconds:g} s; end it.")
            turn = self.tree.ask(request)
        except RefusedError as refused:
            ending: EndReason | None = "seconds" if refused.code == "max_seconds" else _ENDINGS.get(refused.code)
            self.limit = self.limit or ending
            raise
        turn.number, self._num_asked = self._num_asked, self._num_asked + 1
        self.events.append(["ask", request])
        if turn.reply is None:
            self._new.append(turn)
            self._waiting_since = self._waiting_since if self._waiting else time.monotonic()
            answered = self._waiting[turn] = asyncio.get_running_loop().create_future()
            self._changed.set()
            try:
                await answered
            except asyncio.CancelledError:
                self._drop(turn)
                raise
            finally:
                waited_s = self.waited_s
                self._waiting.pop(turn, None)
                self._waited_s = self._waited_s if self._waiting else waited_s
        assert turn.reply is not None
        self.events.append(["got", turn.number, turn.reply.digest])
        return turn.reply

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens before the turn of a request. Raises RefusedError as `complete` does."""
        self._require_running()
        return self.tree.tokens_of(request)

    def drop(self, turn_id: str) -> None:
        """Forget a turn whose reply could not be delivered: it is not trained."""
        for turn in self.tree.turns:
            if turn.turn_id == turn_id and not turn.is_dropped:
                self._drop(turn)

    def _drop(self, turn: TreeTurn) -> None:
        turn.is_dropped = True
        self._num_given_up += 1
        self.events.append(["drop", turn.number])

    def set_reward(self, value: Any) -> None:
        """Set what the episode is worth: a number, or several by name. Raises RefusedError for another value."""
        self._require_running()
        try:
            self.reward = rewards_of(value)
        except ValueError as error:
            raise RefusedError(400, "invalid_reward", f"the reward has {error}") from None

    async def next_turns(self) -> list[TreeTurn]:
        """Return the turns that requests have asked for since the last call, at least one; none if it is over."""
        while not (turns := [turn for turn in self._new if not turn.is_dropped]) and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        self._new = []
        return turns

    def deliver(self, turn: TreeTurn, completion: Completion) -> None:
        """Answer the request of a turn, unless its client has gone."""
        answered = self._waiting.get(turn)
        if answered is not None and not answered.done() and not turn.is_dropped:
            try:
                self.tree.answer(turn, completion)
            except Exception as error:  # of the tokenizer; the request gets it
                answered.set_exception(error)
            else:
                answered.set_result(None)

    def refuse(self, turn: TreeTurn, refused: RefusedError) -> None:
        """Answer the request of a turn with an error; the turn is not kept."""
        answered = self._waiting.get(turn)
        if answered is not None and not answered.done():
            turn.is_dropped = True
            answered.set_exception(refused)

    def restart(self) -> None:
        """Forget what an agent that was lost has asked; the same requests get the same turns. The key is another."""
        self._end_requests("agent_lost", "the process of the agent was lost, and the agent is started again.")
        self.key, self.reward, self.limit, self._began = secrets.token_urlsafe(24), None, None, time.monotonic()
        self.tree.restart()
        self.events, self._num_given_up, self._num_asked = [], 0, 0

    def end(self) -> None:
        """End the episode: open requests and later ones are refused."""
        self.is_over = True
        self._end_requests("episode_ended", "the episode has ended.")
        self._changed.set()

    def _end_requests(self, code: str, problem: str) -> None:
        for turn in self._waiting:
            turn.is_dropped = True
            self.refuse(turn, RefusedError(410, code, problem))
        self._new.clear()
        self._waiting, self._waited_s = {}, 0.0

    def _require_running(self) -> None:
        if self.is_over:
            raise RefusedError(410, "episode_ended", "the episode has ended.")

    def _require_sampling(self, request: ChatRequest) -> None:
        if self._allowed is None:
            return
        for name in ("temperature", "top_p", "top_k"):
            wanted, own = getattr(request, name), getattr(self._allowed, name)
            if wanted is not None and wanted != own:
                raise RefusedError(
                    400,
                    f"unsupported_{name}",
                    f"{name}={wanted:g} is not supported: turns that are trained are sampled as the run says, with "
                    f"{name}={own:g}; leave {name} out, or set agent.override_sampling=true to let the run replace it.",
                )
