"""Many episodes over one engine: it samples the turns that are ready, while environments work on others."""

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.environments.playing import PlayedEpisode, Player
from hybridflow.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.runtime import note_progress

WAIT_S = 1.0
"""Seconds after which a wait for environments reports progress, so that a deadline of the process is not theirs."""


@dataclass(frozen=True)
class EpisodeStart:
    """An episode to play: its player, its row of the data, and the noise key of its tokens."""

    player: Player
    row: Mapping[str, Any]
    noise_key: tuple[int, ...]


def play_episodes(
    engine: RolloutEngine, starts: Sequence[EpisodeStart], sampling: SamplingParams
) -> list[PlayedEpisode]:
    """Play all episodes to their ends with an idle engine, and return them in order.

    `sampling.max_new_tokens` bounds a turn. A token depends on its episode alone: on what came before it, and on the
    noise of its position among the episode's sampled tokens. So the results do not depend on how long environments
    take, up to the rounding of other batches of sequences. Raises RolloutError for a turn that the engine cannot serve.
    """
    played: dict[int, PlayedEpisode] = {}
    with _event_loop() as tasks:
        for number, start in enumerate(starts):
            tasks.start(number, start.player.begin(start.row))
        while len(played) < len(starts):
            for number, result in tasks.done(wait=not engine.has_unfinished()):
                if isinstance(result, PlayedEpisode):
                    played[number] = result
                elif result is None:
                    tasks.start(number, starts[number].player.finish())
                else:
                    engine.submit(_request(number, starts[number], result, sampling))
            if engine.has_unfinished():
                engine.step()
                for completion in engine.finished():
                    tasks.start(completion.request_id, _take(starts[completion.request_id].player, completion))
            note_progress()
    return [played[number] for number in range(len(starts))]


def _request(number: int, start: EpisodeStart, context: list[int], sampling: SamplingParams) -> Request:
    sampled, turn = start.player.num_sampled, len(start.player.episode.turns)
    own = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, start.player.room))
    if sampled < len(context):
        return Request(number, context, own, noise_key=start.noise_key, resume_offset=sampled)
    return Request(number, context, own, noise_key=(*start.noise_key, turn))  # a new row without earlier reasoning


def _take(player: Player, completion: Completion) -> Coroutine[Any, Any, list[int] | None]:
    return player.take(completion.token_ids, completion.log_probs, completion.versions)


class _Tasks:
    """Coroutines on an event loop in another thread, and a queue of what they returned."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._done = loop, queue.SimpleQueue[tuple[int, Any]]()
        self._running = 0

    def start(self, number: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine of an episode."""
        self._running += 1
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(lambda done: self._done.put((number, done)))

    def done(self, *, wait: bool) -> Iterator[tuple[int, Any]]:
        """Yield what coroutines have returned; with `wait` at least one, if any runs. Raises what one raised."""
        while self._running:
            try:
                number, future = self._done.get(timeout=WAIT_S) if wait else self._done.get_nowait()
            except queue.Empty:
                if not wait:
                    return
                note_progress()
                continue
            self._running -= 1
            wait = False
            yield number, future.result()


@contextmanager
def _event_loop() -> Iterator[_Tasks]:
    """Yield tasks on an event loop in a thread; those that still run are cancelled at the end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="environments", daemon=True)
    thread.start()
    try:
        yield _Tasks(loop)
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
