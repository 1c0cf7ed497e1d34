"""The episodes of a rank: prompts in, played and scored episodes out."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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
    play_episodes,
)
from hybridflow.environments.answers import ScoreGroup
from hybridflow.environments.episodes import LOOP_LIMIT_S
from hybridflow.errors import EnvironmentConfigError
from hybridflow.protocol import DataProto
from hybridflow.rewards import RewardResult, RewardScorer
from hybridflow.rewards.closure import Closure
from hybridflow.rewards.journal import RewardJournal
from hybridflow.rewards.outcome import Outcome
from hybridflow.rollout import RolloutEngine, SamplingParams
from hybridflow.workers.episode_batch import episode_batch, repeated
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
        limits = CallLimits(reward.timeout_s, reward.concurrency)
        self._pool = EnvironmentPool(
            environment.classes,
            num_processes=reward.processes,
            limits=limits,
            memory_bytes=reward.memory_bytes,
            closures=closures,
        )
        self._renderers = {name: ChatRenderer(tokenizer, kind.schemas) for name, kind in self._pool.kinds.items()}
        data = config.data
        self._limits = EpisodeLimits(
            turns=environment.max_turns,
            tokens=data.max_response_length,
            context_tokens=data.max_prompt_length + data.max_response_length,
            rows=config.rows_per_episode,
            prompt_tokens=data.max_prompt_length,
        )
        self._scorer = RewardScorer(
            on_error=reward.on_error,
            error_score=reward.error_score,
            max_failure_rate=reward.max_failure_rate,
            weights=reward.weights,
        )
        self._journal = None
        if config.trainer.run_dir:
            sources = [[name, kind.name, kind.source] for name, kind in self._pool.kinds.items()]
            directory = Path(config.trainer.run_dir) / JOURNAL
            self._journal = RewardJournal(directory, rank, sources, failures=reward.on_error == "zero")

    def play(
        self,
        engine: RolloutEngine,
        prompts: DataProto,
        sampling: SamplingParams,
        group_size: int,
        step: int | None,
    ) -> DataProto:
        """Play `group_size` episodes of each prompt; return `rows_per_episode` rows for each, with their scores.

        Answers of environments are in the journal of `step`; None: in no journal.
        """
        journal = self._opened_journal(step)
        noise = tuple(prompts.meta_info["noise_key"])
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
                client = self._client(name, len(starts), (group, index), journal)
                player = Player(client, self._renderers[name], self._stop_ids, self._limits)
                starts.append(EpisodeStart(player, row, (*noise, group), index))
        in_order = self._config.trainer.deterministic
        try:
            limit = LOOP_LIMIT_S if self._config.reward.processes else None  # here user code may stop in a debugger
            loop = self._pool.loop
            played = play_episodes(engine, starts, sampling, loop, in_order=in_order, loop_limit_s=limit)
            played = self._with_group_rewards(played, columns["data_sources"], groups, group_size, journal)
        except EnvironmentConfigError:  # something blocks the event loop, or no process can be started
            raise
        except BaseException:
            self._pool.renew(all_of_them=True)  # they hold environments that nothing will ask again
            raise
        self._pool.renew()
        ids = [group * group_size + index for group in groups for index in range(group_size)]
        first = [start.player.num_first_messages for start in starts]
        dtype = torch.float64 if self._config.model.dtype == "float64" else torch.float32
        rows = episode_batch(played, ids, first, self._config.rows_per_episode, self._tokenizer, dtype)
        result = self._scores(played, step)
        rows.batch["turn_rewards"][result.failed.repeat_interleave(self._config.rows_per_episode)] = 0.0
        rewards = result_columns(result).union(DataProto.from_dict({}, {"answers": repeated(result.answers, 1)}))
        return rows.union(rewards.repeat(self._config.rows_per_episode, interleave=True))

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
        return EpisodeClient(self._pool.place(name, number), key, journal, math.inf if seconds is None else seconds)

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
        result = self._scorer.of_outcomes(names, samples, prompts, outcomes, step)
        bonus = torch.tensor([each.bonus for each in played], dtype=torch.float32)
        return replace(result, scores=torch.where(result.failed, result.scores, result.scores + bonus))


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
