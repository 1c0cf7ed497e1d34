"""Many episodes over one engine: it samples the turns that are ready, while environments work on others."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.environments.episodes.loop_tasks import LoopTasks
from hybridflow.environments.episodes.playing import EpisodePlayer, NextTurn, PlayedEpisode
from hybridflow.errors import EnvironmentConfigError, RolloutError
from hybridflow.rollout import Completion, Request, RolloutEngine, SamplingParams
from hybridflow.rollout.running_groups import longest_first
from hybridflow.runtime.observe import get_logger
from hybridflow.runtime.progress import note_progress

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
) -> list[PlayedEpisode]:
    """Play all episodes to their ends, and return them in order; see `RunningEpisodes`."""
    running = RunningEpisodes(engine, starts, sampling, loop, in_order=in_order)
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
        self._turns, self._ends = LoopTasks(loop, loop_limit_s), LoopTasks(loop, loop_limit_s)
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
            for start in self._starts:
                self._turns.call(start.player.abandon)
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

    def _groups(self, turns: Sequence[tuple[int, NextTurn]]) -> list[list[tuple[int, NextTurn]]]:
        """Return the turns that begin with one prompt as responses of one group, and others alone."""
        groups: list[list[tuple[int, NextTurn]]] = []
        for each in turns:
            if groups and self._is_next_of_group(each, groups[-1][-1]):
                groups[-1].append(each)
            else:
                groups.append([each])
        return groups

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


async def _go_on(player: EpisodePlayer, turn: NextTurn, completion: Completion) -> list[NextTurn]:
    player.deliver(turn, completion)
    return await player.next_turns()
