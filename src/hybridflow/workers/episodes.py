"""The episodes of a rank: prompts in, played and scored episodes out."""

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.checkpoint import CheckpointStore
from hybridflow.config import Config
from hybridflow.environments import (
    Answer,
    CallLimits,
    ChatRenderer,
    EnvironmentPool,
    EpisodeClient,
    EpisodeLimits,
    EpisodeStart,
    PlayedEpisode,
    Player,
)
from hybridflow.environments.episodes.answers import ScoreGroup
from hybridflow.environments.episodes.episodes import LOOP_LIMIT_S, RunningEpisodes
from hybridflow.environments.processes.closure import Closure
from hybridflow.environments.rewards.journal import RewardJournal
from hybridflow.environments.rewards.outcome import Outcome
from hybridflow.environments.rewards.scores import OutcomeReader, RewardResult
from hybridflow.errors import EnvironmentConfigError, RolloutError
from hybridflow.protocol import DataProto
from hybridflow.protocol.meta_info import NOISE_KEY
from hybridflow.rollout import RolloutEngine, SamplingParams
from hybridflow.workers.episode_batch import episode_batch
from hybridflow.workers.reward import result_columns

EPISODE_PROMPT_COLUMNS = ("raw_prompts", "data_sources", "ground_truths", "extra_infos")
"""The columns of prompts that environments read."""

JOURNAL = "environments"
"""The folder of the run directory with the answers of environments, see `RewardJournal`."""


class EpisodeWorker:
    """Plays the episodes of prompts with the environments of a configuration, which it holds."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        rank: int,
        closures: Sequence[Closure] = (),
    ) -> None:
        environment, reward = config.environment, config.reward
        self._config, self._tokenizer, self._stop_ids, self._rank = config, tokenizer, stop_ids, rank
        limits = CallLimits(reward.timeout_s, reward.concurrency, config.agent.timeout_s)
        self._pool = EnvironmentPool(
            environment.classes,
            num_processes=reward.processes,
            limits=limits,
            memory_bytes=reward.memory_bytes,
            reward_function=reward.function,
            reward_kwargs=reward.kwargs,
            closures=closures,
        )
        kinds = self._pool.kinds
        self._renderers = {name: ChatRenderer(tokenizer, kind.schemas) for name, kind in kinds.items()}
        self._agents = None
        if any(kind.is_agent for kind in kinds.values()):
            from hybridflow.workers.agents import AgentWorker  # with a web server

            self._agents = AgentWorker(config, tokenizer, stop_ids, self._pool)
        data = config.data
        self._limits = EpisodeLimits(
            turns=environment.max_turns,
            tokens=data.max_response_length,
            context_tokens=data.max_prompt_length + data.max_response_length,
            rows=config.rows_per_episode,
            prompt_tokens=data.max_prompt_length,
        )
        self._reader = OutcomeReader(reward.on_error, reward.error_score, reward.max_failure_rate, reward.weights)
        self._journal = None
        if config.trainer.run_dir:
            sources: list[Any] = [[name, kind.name, kind.source] for name, kind in self._pool.kinds.items()]
            sources += [[reward.function, reward.kwargs]] if reward.function else []
            directory = Path(config.trainer.run_dir) / JOURNAL
            self._journal = RewardJournal(directory, rank, sources, failures=reward.on_error == "zero")

    def start(
        self,
        engine: RolloutEngine,
        prompts: DataProto,
        sampling: SamplingParams,
        group_size: int,
        step: int | None,
        between_steps: Callable[[], None] = lambda: None,
    ) -> "PlayedBatch":
        """Return a batch of `group_size` episodes of each prompt, which are played as it is read.

        Answers of environments are in the journal of `step`; None: in no journal. `between_steps` is called after each
        step of the engine.
        """
        journal = self._opened_journal(step)
        noise = tuple(prompts.meta_info[NOISE_KEY])
        columns = {name: prompts.non_tensor_batch[name].tolist() for name in EPISODE_PROMPT_COLUMNS}
        groups = prompts.batch["group_ids"].tolist()
        starts: list[EpisodeStart] = []
        for number, group in enumerate(groups):
            name = self._name_of(columns["data_sources"][number])
            row = {
                "prompt": columns["raw_prompts"][number],
                "data_source": columns["data_sources"][number],
                "ground_truth": columns["ground_truths"][number],
                "extra_info": columns["extra_infos"][number] or {},
            }
            for index in range(group_size):
                key = (group, index)
                if self._agents and self._pool.kinds[name].is_agent:
                    player = self._agents.player(name, len(starts), key, journal, self._limits, sampling)
                else:
                    client = self._client(name, len(starts), key, journal)
                    player = Player(client, self._renderers[name], self._stop_ids, self._limits)
                starts.append(EpisodeStart(player, row, (*noise, group), index))
        running = RunningEpisodes(
            engine,
            starts,
            sampling,
            self._pool.loop,
            group_size=group_size,
            in_order=self._config.trainer.deterministic,
            loop_limit_s=LOOP_LIMIT_S if self._config.reward.processes else None,  # here user code may be debugged
            between_steps=between_steps,
            most_running=self._config.reward.concurrency * max(1, self._config.reward.processes) if self._agents else 0,
        )
        # Only training has a step, and replays routes.
        routes_shape = engine.routes_shape if step is not None else (0, 0)
        return PlayedBatch(self, running, starts, groups, group_size, journal, step, routes_shape)

    def rows_of(self, batch: "PlayedBatch", numbers: Sequence[int], played: Sequence[PlayedEpisode]) -> DataProto:
        """Return the rows of the prompts of these numbers, whose groups have `played`, with their scores."""
        size, rows_per_episode = batch.group_size, self._config.rows_per_episode
        sources = [batch.starts[number * size].row["data_source"] for number in numbers]
        groups = [batch.groups[number] for number in numbers]
        scored = self._with_group_rewards(played, sources, groups, size, batch.journal)
        ids = [group * size + index for group in groups for index in range(size)]
        dtype = torch.float64 if self._config.model.dtype == "float64" else torch.float32
        rows = episode_batch(scored, ids, rows_per_episode, self._tokenizer, dtype, self._stop_ids, batch.routes_shape)
        result = self._scores(scored, batch.step)
        rows.batch["turn_rewards"][result.failed.repeat_interleave(rows_per_episode)] = 0.0
        rewards = result_columns(result).union(DataProto.from_dict({}, {"answers": result.answers}))
        return rows.union(rewards.repeat(rows_per_episode, interleave=True))

    def renew(self, *, all_of_them: bool = False) -> None:
        """End processes of environments that nothing will ask again: those that are stuck, or all."""
        self._pool.renew(all_of_them=all_of_them)

    def _opened_journal(self, step: int | None) -> RewardJournal | None:
        """Return the journal, with what it knows of the step; None without a step."""
        journal = self._journal
        if journal is None or step is None:
            return None
        if self._rank == 0:
            checkpoints = CheckpointStore(Path(self._config.trainer.run_dir) / "checkpoints").list()
            journal.forget_before(min(checkpoints, default=0))
        journal.reopen()  # a step may be repeated in this process
        journal.open(step)
        return journal

    def _client(self, name: str, number: int, key: tuple[int, ...], journal: RewardJournal | None) -> EpisodeClient:
        seconds = self._config.environment.max_seconds
        return EpisodeClient(
            self._pool.environment(name, number), key, journal, math.inf if seconds is None else seconds
        )

    def _name_of(self, data_source: str) -> str:
        """Return the class of a row: the only one, or the one that its data source names."""
        classes = self._config.environment.classes
        return data_source if len(classes) > 1 else next(iter(classes))

    def _with_group_rewards(
        self,
        played: Sequence[PlayedEpisode],
        data_sources: Sequence[str],
        groups: Sequence[int],
        size: int,
        journal: RewardJournal | None,
    ) -> list[PlayedEpisode]:
        """Return the episodes with what each is worth beside the others of its prompt, if its class says so."""
        asked: dict[int, Callable[[], Answer]] = {}
        for number, source in enumerate(data_sources):
            name = self._name_of(source)
            if self._pool.kinds[name].scores_groups:
                client = self._client(name, number, (groups[number],), journal)
                episodes = [each.episode for each in played[number * size : (number + 1) * size]]
                asked[number] = asyncio.run_coroutine_threadsafe(client(ScoreGroup(episodes)), self._pool.loop).result
        result = list(played)
        for number, answer_of in asked.items():
            answer = answer_of()
            for index in range(size):
                place = number * size + index
                result[place] = with_group_reward(result[place], answer, index)
        return result

    def _scores(self, played: Sequence[PlayedEpisode], step: int | None) -> RewardResult:
        samples, outcomes, prompts = [], [], []
        for each in played:
            row = each.episode.row
            said = each.episode.turns[-1].content if each.episode.turns else ""
            samples.append(
                {"data_source": row["data_source"], "solution_str": said, "ground_truth": row["ground_truth"]}
            )
            prompts.append(row["prompt"])
            outcomes.append(_outcome_of(each))
        names = [f"environment {self._name_of(sample['data_source'])!r}" for sample in samples]
        result = self._reader.read(names, samples, prompts, outcomes, step)
        bonus = torch.tensor([each.bonus for each in played], dtype=torch.float32)
        return replace(result, scores=torch.where(result.failed, result.scores, result.scores + bonus))


@dataclass
class PlayedBatch:
    """The episodes of a batch of prompts, which are read in parts or as a whole."""

    worker: EpisodeWorker
    running: RunningEpisodes
    starts: Sequence[EpisodeStart]
    groups: Sequence[int]
    group_size: int
    journal: RewardJournal | None
    step: int | None
    routes_shape: tuple[int, int]

    @property
    def num_left(self) -> int:
        """The number of prompts whose episodes were not returned yet."""
        return self.running.num_left

    def next(self, count: int) -> tuple[list[int], DataProto]:
        """Return the numbers of those prompts whose groups end next, and the rows of their episodes."""
        return self._rows(lambda: self.running.next(count))

    def rest(self) -> tuple[list[int], DataProto]:
        """Return the same of all prompts that are left, in their order."""
        return self._rows(lambda: sorted(self.running.next(self.num_left), key=lambda group: group[0]))

    def abandon(self) -> None:
        """End all episodes."""
        self.running.abandon()
        self.worker.renew(all_of_them=True)

    def _rows(self, play: Callable[[], list[tuple[int, list[PlayedEpisode]]]]) -> tuple[list[int], DataProto]:
        try:
            groups = play()
            numbers = [number for number, _ in groups]
            rows = self.worker.rows_of(self, numbers, [each for _, episodes in groups for each in episodes])
        except EnvironmentConfigError:  # something blocks the event loop, or no process can be started
            self.running.abandon()
            raise
        except BaseException:
            self.abandon()
            raise
        if not self.num_left:
            self.worker.renew()
        return numbers, rows


class BegunEpisodes:
    """Batches of episodes that have begun. They are played one after another, when they are read."""

    def __init__(self, ready_to_generate: Callable[[], AbstractContextManager[None]]) -> None:
        self._ready_to_generate, self._is_ready = ready_to_generate, ExitStack()
        self._begun: dict[Hashable, tuple[DataProto, Callable[[], PlayedBatch]]] = {}
        self._played: dict[Hashable, PlayedBatch] = {}  # one at most

    def begin(self, batch: Hashable, prompts: DataProto, start: Callable[[], PlayedBatch]) -> None:
        """Begin a batch; `start` is called when it is read. Raises RolloutError if it has begun."""
        if batch in self._begun:
            raise RolloutError(f"batch {batch!r} has begun already; read all of its groups first.")
        self._begun[batch] = prompts, start

    def next(self, batch: Hashable, count: int) -> tuple[DataProto, DataProto]:
        """Return the `count` prompts whose episodes end next, and their rows."""
        return self._read(batch, lambda played: played.next(count))

    def rest(self, batch: Hashable) -> tuple[DataProto, DataProto]:
        """Return the prompts that are left, in order, and their rows."""
        return self._read(batch, lambda played: played.rest())

    def abandon(self) -> None:
        """End all episodes and forget the batches."""
        for played in self._played.values():
            played.abandon()
        self._forget()

    def _read(
        self, batch: Hashable, read: Callable[[PlayedBatch], tuple[list[int], DataProto]]
    ) -> tuple[DataProto, DataProto]:
        if batch not in self._begun:
            raise RolloutError(f"batch {batch!r} has no groups left.")
        if others := [other for other in self._played if other != batch]:
            raise RolloutError(f"batch {others[0]!r} is still played; read all of its groups first.")
        prompts, start = self._begun[batch]
        try:
            if not self._played:
                self._is_ready.enter_context(self._ready_to_generate())
                self._played[batch] = start()
            played = self._played[batch]
            numbers, rows = read(played)
        except BaseException:
            self._forget()
            raise
        if not played.num_left:
            del self._begun[batch], self._played[batch]
            self._is_ready.close()
        return prompts.select_idxs(numbers), rows

    def _forget(self) -> None:
        self._begun.clear()
        self._played.clear()
        self._is_ready.close()


def episode_worker(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    rank: int,
    closures: Sequence[Closure] = (),
) -> EpisodeWorker | None:
    """Return the player of a rank's episodes; None without environments."""
    return EpisodeWorker(config, tokenizer, stop_ids, rank, closures) if config.environment.classes else None


def with_group_reward(played: PlayedEpisode, answer: Answer, index: int) -> PlayedEpisode:
    """Return an episode with its number of `group_rewards`, or with the failure of that call."""
    if played.failure:
        return played
    if answer.failure:
        episode = replace(played.episode, ended="error", error=answer.error)
        return replace(played, episode=episode, rewards={}, failure=answer.failure)
    return replace(played, bonus=played.bonus + answer.group[index])


def _outcome_of(played: PlayedEpisode) -> Outcome:
    """Return the rewards as the outcome of a call, or the failure, whose text says which method it was."""
    if played.failure:
        return Outcome(kind="timeout" if played.failure == "timeout" else "died", problem=played.episode.error)
    return Outcome(dict(played.rewards))
