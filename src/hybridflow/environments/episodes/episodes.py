"""Many episodes over one engine: it samples the turns that are ready, while environments work on others."""

import asyncio
import itertools
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hybridflow.environments.episodes.playing import EpisodePlayer, NextTurn, PlayedEpisode
from hybridflow.errors import EnvironmentConfigError, RolloutError
from hybridflow.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.rollout.running_groups import longest_first
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.progress import note_progress

WAIT_S = 1.0
"""Seconds after which a wait for environments reports progress, so that a deadline of the process is not theirs."""

LOOP_LIMIT_S = 60.0
"""Seconds in which the event loop must go on; only a chat template can block it, if environments have processes."""

ROUND_STEPS = 16
"""Steps of the engine between two times at which turns begin, if the order must not depend on time."""

FIRST_TURNS = 64
"""Turns for which an idle engine waits in that case: it works on them while the others are made."""

PATIENCE_S = 60.0
"""Seconds in which order waits for agents while others could go on, for which they may wait: they may share a lock."""

FIRST_TURNS_S = 1.0
"""Seconds in which first turns wait for each other without order, so that a group runs as one."""

LATE = (
    "agents have not asked for a turn in %g s while others could go on, for which they may wait: the turns of this "
    "batch begin as they are asked for from here on, and its bits depend on time; set trainer.deterministic = false."
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class EpisodeStart:
    """An episode to play: its player, its row of the data, and the noise key and index in its group of its tokens."""

    player: EpisodePlayer
    row: Mapping[str, Any]
    noise_key: tuple[int, ...]
    index: int = 0


def play_episodes(
    engine: RolloutEngine,
    starts: Sequence[EpisodeStart],
    sampling: SamplingParams,
    loop: asyncio.AbstractEventLoop,
    *,
    in_order: bool = True,
    loop_limit_s: float | None = LOOP_LIMIT_S,
) -> list[PlayedEpisode]:
    """Play all episodes to their ends, and return them in order; see `RunningEpisodes`."""
    running = RunningEpisodes(engine, starts, sampling, loop, in_order=in_order, loop_limit_s=loop_limit_s)
    return [episode for _, (episode,) in sorted(running.next(len(starts)), key=lambda each: each[0])]


class RunningEpisodes:
    """The episodes of a batch over an idle engine, `group_size` of each prompt in a row; environments run on `loop`.

    `sampling.max_new_tokens` bounds a turn. A token depends on its episode alone: on what came before it, and on the
    noise of its position among the episode's sampled tokens. With `in_order`, turns begin at certain steps of the
    engine, which waits for their environments then: so the sequences that run beside each other, and with them the
    rounding, do not depend on how long environments take, nor does the order in which groups end. Agents that are
    late by PATIENCE_S while others could go on end the order of the batch. `between_steps` is called after each step
    of the engine; it may load weights. At most `most_running` episodes run at a time; 0: all.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        starts: Sequence[EpisodeStart],
        sampling: SamplingParams,
        loop: asyncio.AbstractEventLoop,
        *,
        group_size: int = 1,
        in_order: bool = True,
        loop_limit_s: float | None = LOOP_LIMIT_S,
        between_steps: Callable[[], None] = lambda: None,
        most_running: int = 0,
    ) -> None:
        self._engine, self._starts, self._sampling, self._in_order = engine, starts, sampling, in_order
        self._group_size, self._between_steps = group_size, between_steps
        on_loop = _Loop(loop, loop_limit_s)
        self._turns, self._ends = _Tasks(on_loop), _Tasks(on_loop)
        self._num_steps = 0
        self._running: dict[tuple[int, int], tuple[int, NextTurn]] = {}  # by request and index: episode and turn
        self._num_sampled: Counter[int] = Counter()  # turns of each episode that the engine samples
        self._has_ended: set[int] = set()
        self._to_begin = deque(range(len(starts)))
        self._most_running = most_running or len(starts)
        self._request_ids = itertools.count()  # an episode goes on while others of its first request still run
        self._num_ended: Counter[int] = Counter()  # of each group
        self._ended: list[int] = []  # groups that have ended and were not returned yet, in order
        self.num_left = len(starts) // group_size
        self._has_begun = False

    def next(self, count: int) -> list[tuple[int, list[PlayedEpisode]]]:
        """Play until `count` more groups have ended; return their numbers and episodes, in the order of their ends.

        Raises RolloutError for a turn that the engine cannot serve, or if fewer groups are left, and
        EnvironmentConfigError if `loop` is blocked for `loop_limit_s`, in which chat templates run. After an error, no
        episode runs.
        """
        if count > self.num_left:
            raise RolloutError(f"the batch of episodes has {self.num_left} groups left, fewer than {count}.")
        try:
            if not self._has_begun:
                self._begin()
            while len(self._ended) < count:
                self._submit(self._ready())
                self._stop_unwanted()
                if self._engine.has_unfinished():
                    self._engine.step()
                    self._num_steps += 1
                    self._between_steps()
                self._take_finished()  # an engine may finish sequences without a step
                if not (self._turns or self._engine.has_unfinished() or len(self._ended) >= count):
                    raise RolloutError("the engine is idle, but episodes have not ended: it has lost their turns.")
                note_progress()
            groups, self._ended = self._ended[:count], self._ended[count:]
            members = [range(group * self._group_size, (group + 1) * self._group_size) for group in groups]
            played = dict(self._ends.wait([number for numbers in members for number in numbers]))
        except BaseException:
            self.abandon()
            raise
        self.num_left -= count
        if not self.num_left:
            self._make_idle()
        return [(group, [played[n] for n in numbers]) for group, numbers in zip(groups, members, strict=True)]

    def abandon(self) -> None:
        """End all episodes; the engine is idle then."""
        self._turns.cancel()
        self._ends.cancel()
        with suppress(EnvironmentConfigError):  # the loop has ended
            self._turns.call(_abandon, [start.player for start in self._starts])
        self._make_idle()
        self.num_left = 0

    def _make_idle(self) -> None:
        for request in {request for request, _ in self._running}:
            with suppress(RolloutError):  # finished
                self._engine.abort(request)
        self._engine.finished()
        self._engine.forget_kept()

    def _begin(self) -> None:
        self._has_begun = True
        self._begin_some(self._most_running)
        self._submit(self._waited(self._turns.oldest()))  # all: the responses to one prompt run as one group

    def _begin_some(self, count: int) -> None:
        numbers = [self._to_begin.popleft() for _ in range(min(count, len(self._to_begin)))]
        starts = {number: self._starts[number] for number in numbers}
        begins = {number: start.player.start(start.row) for number, start in starts.items()}
        self._turns.start(begins, self._num_steps)

    def _ready(self) -> list[tuple[int, list[NextTurn]]]:
        """Return what environments have returned, as far as it may be used now."""
        is_idle = not self._engine.has_unfinished()
        if not self._in_order:
            return self._turns.some(1 if is_idle else 0)
        if is_idle:
            return self._waited(self._turns.oldest()[:FIRST_TURNS])
        if self._num_steps % ROUND_STEPS:
            return []
        return self._waited(self._turns.oldest(started_before=self._num_steps - ROUND_STEPS))

    def _waited(self, numbers: Sequence[int]) -> list[tuple[int, list[NextTurn]]]:
        """Wait for turns of these episodes; do without some if agents take too long while others could go on."""
        if any(self._starts[number].player.is_parallel for number in numbers):
            seconds = PATIENCE_S if self._in_order else FIRST_TURNS_S
            if not self._turns.has(numbers, seconds, may_go_on=self._engine.has_unfinished()):
                if self._in_order:
                    logger.warning(LATE, seconds)
                self._in_order = False
                return self._turns.some(0)
        return self._turns.wait(numbers)

    def _submit(self, results: Sequence[tuple[int, list[NextTurn]]]) -> None:
        """Go on with episodes in their order: with their turns, or with their end."""
        turns: list[tuple[int, NextTurn]] = []
        ends: dict[int, Coroutine[Any, Any, PlayedEpisode]] = {}
        more: dict[int, Coroutine[Any, Any, list[NextTurn]]] = {}
        for number, asked in sorted(results, key=lambda each: each[0]):
            player = self._starts[number].player
            turns += [(number, turn) for turn in asked]
            self._num_sampled[number] += len(asked)
            if not asked:
                self._has_ended.add(number)
                ends[number] = player.finish()
                group = number // self._group_size
                self._num_ended[group] += 1
                if self._num_ended[group] == self._group_size:
                    self._ended.append(group)
            elif player.is_parallel:
                more[number] = player.next_turns()
        self._ends.start(ends, self._num_steps)
        self._turns.start(more)
        self._begin_some(len(ends))
        requests = [self._request(group) for group in self._groups(turns)]
        for request in sorted(requests, key=longest_first):
            self._engine.submit(request)

    def _groups(self, turns: Sequence[tuple[int, NextTurn]]) -> Iterator[list[tuple[int, NextTurn]]]:
        """Yield the turns that begin with one prompt as responses of one group, and others alone."""
        group: list[tuple[int, NextTurn]] = []
        for each in turns:
            if group and self._is_next_of_group(each, group[-1]):
                group.append(each)
                continue
            if group:
                yield group
            group = [each]
        if group:
            yield group

    def _is_next_of_group(self, each: tuple[int, NextTurn], last: tuple[int, NextTurn]) -> bool:
        (this, turn), (other, before) = (self._starts[each[0]], each[1]), (self._starts[last[0]], last[1])
        same_noise = (
            this.noise_key == other.noise_key and turn.noise == before.noise and not (turn.offset or before.offset)
        )
        is_same = turn.context == before.context and turn.room == before.room
        return same_noise and this.index == other.index + 1 and is_same

    def _request(self, group: list[tuple[int, NextTurn]]) -> Request:
        number, turn = group[0]
        start, sampling = self._starts[number], self._sampling
        own = replace(
            sampling,
            max_new_tokens=min(sampling.max_new_tokens, turn.room),
            stop_strings=(*sampling.stop_strings, *turn.stop_strings),
        )
        request_id = next(self._request_ids)
        self._running |= {(request_id, index): each for index, each in enumerate(group)}
        return Request(
            request_id,
            turn.context,
            own,
            group_size=len(group),
            noise_key=(*start.noise_key, *turn.noise),
            resume_offset=turn.offset,
            first_index=start.index,
            keep=turn.keep,
            total_tokens=turn.total_tokens,
        )

    def _stop_unwanted(self) -> None:
        """Stop requests whose turns are all given up; in order they run on, since that depends on time."""
        if self._in_order:
            return
        wanted = {request for (request, _), (_, turn) in self._running.items() if turn.is_wanted()}
        for request in {request for request, _ in self._running} - wanted:
            with suppress(RolloutError):  # finished
                self._engine.abort(request)

    def _take_finished(self) -> None:
        turns: dict[int, Coroutine[Any, Any, list[NextTurn]]] = {}
        for completion in self._engine.finished():
            number, turn = self._running.pop((completion.request_id, completion.index))
            player = self._starts[number].player
            self._num_sampled[number] -= 1
            if number in self._has_ended:  # its agent has ended without this turn
                continue
            if not player.is_parallel:
                turns[number] = _go_on(player, turn, completion)
                continue
            self._turns.call(player.deliver, turn, completion)
            if not self._num_sampled[number]:
                self._turns.wait_from(number, self._num_steps)
        self._turns.start(turns, self._num_steps)


def _abandon(players: Sequence[EpisodePlayer]) -> None:
    for player in players:
        player.abandon()


async def _go_on(player: EpisodePlayer, turn: NextTurn, completion: Completion) -> list[NextTurn]:
    player.deliver(turn, completion)
    return await player.next_turns()


class _Loop:
    """An event loop in another thread, and since when it owes a sign of life."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float | None) -> None:
        self.loop, self._limit_s = loop, limit_s
        self._asked: float | None = None

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop. Raises EnvironmentConfigError if the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:
            raise EnvironmentConfigError(
                "the event loop of the environments has ended while episodes were played: their pool was closed, or an "
                "environment in this process ended it, as sys.exit() in a task does; close the pool after the episodes."
            ) from error

    def require_running(self) -> None:
        """Raise EnvironmentConfigError if the loop has ended, or something has blocked it for too long."""
        asked = self._asked
        if asked is None:
            self._asked = time.monotonic()
            self.call(self._hear)
        elif self._limit_s is not None and time.monotonic() - asked > self._limit_s:
            raise EnvironmentConfigError(
                f"an episode has not gone on for {self._limit_s:g} s: the chat template of model.path does not end for "
                "its messages. `hybridflow check-template` shows whether a template serves episodes."
            )

    def _hear(self) -> None:
        self._asked = None


class _Tasks:
    """Coroutines of episodes on an event loop in another thread, and what they have returned."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._running: dict[int, int | None] = {}  # by episode: the step since which it is waited for, if it is
        self._tasks: dict[int, asyncio.Task[Any]] = {}  # the same, those that have begun; for the loop
        self._queue = queue.SimpleQueue[tuple[int, asyncio.Task[Any]]]()
        self._done: dict[int, asyncio.Task[Any]] = {}  # taken from the queue

    def __bool__(self) -> bool:
        """Return whether some have not been returned."""
        return bool(self._running)

    def start(self, coroutines: Mapping[int, Coroutine[Any, Any, Any]], step: int | None = None) -> None:
        """Run coroutines by episode, which has no other one. The loop is woken once for all.

        Those without a `step` are not waited for until `wait_from`.
        """
        if coroutines:
            self._running.update(dict.fromkeys(coroutines, step))
            try:
                self._loop.call(self._begin, coroutines)
            except EnvironmentConfigError:
                for coroutine in coroutines.values():
                    coroutine.close()
                raise

    def wait_from(self, number: int, step: int) -> None:
        """Wait for the coroutine of an episode as if it had been started at a step."""
        if number in self._running:
            self._running[number] = step

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the loop."""
        self._loop.call(function, *arguments)

    def oldest(self, started_before: int | None = None) -> list[int]:
        """Return the episodes whose coroutines were started up to a step, in the order of steps and numbers."""
        started = sorted((step, number) for number, step in self._running.items() if step is not None)
        return [number for step, number in started if started_before is None or step <= started_before]

    def wait(self, numbers: Sequence[int]) -> list[tuple[int, Any]]:
        """Wait for the coroutines of these episodes; return what they, and those not waited for, returned.

        Raises what one raised.
        """
        self._wait(lambda: all(number in self._done for number in numbers))
        others = [number for number in self._done if self._running[number] is None]
        return [(number, self._pop(number)) for number in (*numbers, *others)]

    def has(self, numbers: Sequence[int], seconds: float, *, may_go_on: bool) -> bool:
        """Return whether these episodes have all returned.

        Wait for that, but after `seconds` only as long as none has returned and not `may_go_on`.
        """
        until = time.monotonic() + seconds
        self._wait(
            lambda: self._done.keys() >= set(numbers) or (time.monotonic() > until and (may_go_on or bool(self._done)))
        )
        return self._done.keys() >= set(numbers)

    def some(self, count: int) -> list[tuple[int, Any]]:
        """Wait until `count` coroutines have returned, if so many run; return what all that have done returned."""
        self._wait(lambda: len(self._done) >= min(count, len(self._running)))
        return [(number, self._pop(number)) for number in list(self._done)]

    def cancel(self) -> None:
        """Cancel what runs, unless the loop has ended."""
        with suppress(EnvironmentConfigError):
            self._loop.call(self._cancel)

    def _begin(self, coroutines: Mapping[int, Coroutine[Any, Any, Any]]) -> None:
        for number, coroutine in coroutines.items():
            self._tasks[number] = task = self._loop.loop.create_task(coroutine)
            task.add_done_callback(partial(self._end, number))

    def _end(self, number: int, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.exception()  # asyncio need not report it: who waits will
        del self._tasks[number]
        self._queue.put((number, task))

    def _cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _pop(self, number: int) -> Any:
        del self._running[number]
        try:
            return self._done.pop(number).result()
        except asyncio.CancelledError as error:
            raise RolloutError(
                "the pool of environments was closed while episodes were played; close it later."
            ) from error

    def _wait(self, is_enough: Callable[[], bool]) -> None:
        """Take what coroutines return until it is enough, and what else has returned by then."""
        while True:
            while not self._queue.empty():
                number, task = self._queue.get()
                self._done[number] = task
            if is_enough():
                return
            try:
                number, task = self._queue.get(timeout=WAIT_S)
                self._done[number] = task
            except queue.Empty:
                self._loop.require_running()
            note_progress()
