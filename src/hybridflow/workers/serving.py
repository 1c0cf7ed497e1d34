"""A model behind a base URL, outside of a run: the turns of one session that never ends.

    client --HTTP--> endpoint --> session ──> queue ──> engine ──> session --> endpoint --HTTP--> client
                     (an event loop in a thread)        (the thread that serves)

Requests that are open at a time run as one batch.
"""

import asyncio
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from hybridflow.config import Config
from hybridflow.controller import Dispatch, register
from hybridflow.environments import EpisodeLimits
from hybridflow.environments.agents.chat import RefusedError
from hybridflow.environments.agents.endpoint import Endpoint
from hybridflow.environments.agents.session import Session
from hybridflow.environments.agents.turn_tree import Renderers, TreeTurn, TurnTree
from hybridflow.errors import DataConfigError, HybridFlowError, RolloutError
from hybridflow.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.runtime.observe import JsonlWriter, get_logger
from hybridflow.workers.actor_rollout import ActorRolloutWorker

WAIT_S = 1.0
"""Seconds between two looks for an interrupt while no request is open."""

MOST_TURNS = 4096
"""Number of turns that a request can continue; older turns are forgotten."""

KEPT_TOKENS, MOST_KEPT_TOKENS = 2**16, 2**20
"""Tokens with keys and values kept for later turns: once the engine is idle, and at most."""

RECORD = "turns.jsonl"
"""The file of recorded turns in the directory that is given."""

logger = get_logger(__name__)


class ServingWorker(ActorRolloutWorker):
    """A worker that serves its model at `host` and `port` to clients that have the `key`.

    With `record` it writes each turn to `turns.jsonl` in this directory.
    """

    def __init__(self, config: Config, host: str, port: int, key: str, record: str = "") -> None:
        self._host, self._port, self._key, self._record = host, port, key, record
        super().__init__(config)

    def prepare(self) -> None:
        """Open the file and take the port, before the weights are loaded."""
        self._writer = None
        if self._record:
            try:
                self._writer = JsonlWriter(Path(self._record) / RECORD)
            except (OSError, ValueError) as error:  # ValueError: a NUL in the path
                raise DataConfigError(f"--record {self._record} cannot be written: {error}.") from error
        self._endpoint = Endpoint(self._host, self._port)

    @register(Dispatch.RANK_ZERO)
    def base_url(self) -> str:
        """Return the address, without `/v1`."""
        return self._endpoint.base_url

    @register(Dispatch.RANK_ZERO)
    def serve(self) -> None:
        """Answer requests until KeyboardInterrupt."""
        rollout, most = self.config.rollout, sys.maxsize
        limits = EpisodeLimits(most, rollout.max_model_len, rollout.max_model_len, most)
        session = Session(TurnTree(Renderers(self.tokenizer), self.stop_ids, limits), None, key=self._key)
        session.events = deque(maxlen=0)  # no journal
        with self.ready_to_generate(), _loop_in_thread() as wait_for:
            asked = SimpleQueue[TreeTurn]()
            request = partial(request_of, self.config, self.stop_ids)
            turns = ServedTurns(self.rollout, request, lambda *done: wait_for(self._deliver(session, *done)))
            try:
                wait_for(self._start(session, asked))
                while True:
                    turns.add(_taken(asked, wait=not turns.running))
                    turns.advance()
            finally:
                wait_for(self._stop(session))

    async def _start(self, session: Session, asked: SimpleQueue[TreeTurn]) -> None:
        async def pass_on() -> None:
            while turns := await session.next_turns():
                for turn in turns:
                    asked.put(turn)

        self._passing = asyncio.create_task(pass_on())
        self._endpoint.sessions[""] = session
        await self._endpoint.start()

    async def _stop(self, session: Session) -> None:
        session.end()
        await self._endpoint.stop()
        await self._passing

    async def _deliver(
        self, session: Session, turn: TreeTurn, result: Completion | RefusedError, seconds: float
    ) -> None:
        """Answer the request of a turn and record it; the reply is sent afterwards."""
        if isinstance(result, RefusedError):
            session.refuse(turn, result)
            return
        session.deliver(turn, result)
        if self._writer and turn.is_kept:
            self._writer.write(recorded(turn, result, seconds))
        session.tree.forget_oldest(MOST_TURNS)


class ServedTurns:
    """The turns that an engine samples. `deliver` gets each with its completion, or an error, and its seconds."""

    def __init__(
        self,
        engine: RolloutEngine,
        request: Callable[[int, TreeTurn], Request],
        deliver: Callable[[TreeTurn, Completion | RefusedError, float], None],
    ) -> None:
        self._engine, self._request, self._deliver = engine, request, deliver
        self.running: dict[int, tuple[TreeTurn, float]] = {}
        self._numbers, self._kept_tokens = itertools.count(), 0

    def add(self, turns: Sequence[TreeTurn]) -> None:
        """Begin turns; what the engine cannot serve is refused."""
        for turn in turns:
            number = next(self._numbers)
            try:
                self._engine.submit(self._request(number, turn))
                self.running[number] = turn, time.monotonic()
            except HybridFlowError as error:
                self._deliver(turn, RefusedError(400, "not_served", str(error)), 0.0)

    def advance(self) -> None:
        """Give up turns whose clients have gone, and add a token to the others.

        After an error of the engine, all turns that run are refused.
        """
        self._abort([number for number, (turn, _) in self.running.items() if turn.is_dropped])
        if self.running:
            try:
                self._engine.step()
            except HybridFlowError as error:
                logger.error("%s", error)
                for turn in self._abort(list(self.running)):
                    self._deliver(turn, RefusedError(500, "engine_failed", str(error)), 0.0)
        for completion in self._engine.finished():
            if found := self.running.pop(completion.request_id, None):
                turn, began = found
                self._kept_tokens += len(turn.prompt.ids) + len(completion.token_ids)
                self._deliver(turn, completion, time.monotonic() - began)
        if self._kept_tokens > (MOST_KEPT_TOKENS if self.running else KEPT_TOKENS):
            self._engine.forget_kept()
            self._kept_tokens = 0

    def _abort(self, numbers: Sequence[int]) -> list[TreeTurn]:
        for number in numbers:
            with suppress(RolloutError):  # it has just finished
                self._engine.abort(number)
        return [self.running.pop(number)[0] for number in numbers]


def request_of(config: Config, stop_ids: Sequence[int], number: int, turn: TreeTurn) -> Request:
    """Return the request of a turn; what its client has left out is as the run samples."""
    asked, rollout = turn.request, config.rollout
    sampling = SamplingParams(
        turn.max_tokens if asked.max_tokens else min(turn.max_tokens, config.data.max_response_length),
        rollout.temperature if asked.temperature is None else asked.temperature,
        rollout.top_k if asked.top_k is None else asked.top_k,
        rollout.top_p if asked.top_p is None else asked.top_p,
        tuple(stop_ids),
        (*rollout.stop_strings, *asked.stop),
    )
    return Request(number, turn.context, sampling, noise_key=(config.trainer.seed, *turn.noise), keep=True)


def recorded(turn: TreeTurn, completion: Completion, seconds: float) -> dict[str, Any]:
    """Return the row of a turn: its conversation, which ends with it, and its tokens."""
    return {
        "turn_id": turn.turn_id,
        "parent_id": turn.parent.turn_id if turn.parent else None,
        "messages": [*turn.request.messages[: turn.position], turn.written],
        "tools": list(turn.request.tools),
        "prompt_ids": turn.context,
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "versions": completion.versions,
        "finish": completion.finish_reason,
        "seconds": round(seconds, 3),
    }


def _taken(asked: SimpleQueue[TreeTurn], *, wait: bool) -> list[TreeTurn]:
    """Return what is in a queue; if it is empty and `wait`, wait a while."""
    taken = []
    with suppress(Empty):
        while True:
            taken.append(asked.get(wait and not taken, WAIT_S))
    return taken


@contextmanager
def _loop_in_thread() -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Yield a function that runs a coroutine on an event loop in a thread, and waits for its end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="endpoint", daemon=True)
    thread.start()
    try:
        yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
