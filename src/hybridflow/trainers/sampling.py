"""From prompts to scored responses, in one round of generation or several (dynamic sampling)."""

from collections.abc import Iterator
from typing import Any

import torch

from hybridflow.config import Config
from hybridflow.config.roles import has_own_pool
from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.begun import Begun, NextPrompts, ScoredParts
from hybridflow.trainers.dynamic_sampling import dynamic_sampling
from hybridflow.trainers.generation_schedule import GenerationSchedule
from hybridflow.trainers.in_flight import Running, begin_in_flight
from hybridflow.trainers.lending import Lending
from hybridflow.trainers.reading import read
from hybridflow.trainers.ready_groups import ReadyGroups
from hybridflow.trainers.stages import with_group_ids
from hybridflow.trainers.streamed_generation import StreamedGeneration
from hybridflow.workers.algorithm_functions import reads_column

TRAINING_STREAM = 0
"""Second entry of the noise key of training; validation has its own."""


class Sampling:
    """Sampling of `rollout.group_size` responses to each prompt, with scores. `metrics` are of the last call."""

    def __init__(
        self, config: Config, rollout: WorkerGroup, rewards: WorkerGroup, actor: WorkerGroup | None = None
    ) -> None:
        """`actor`: the group that trains, whose idle ranks generate too with placement.lend."""
        self.config, self._rollout, self._rewards = config, rollout, rewards
        self.schedule = GenerationSchedule(config, rollout)
        self._stream = StreamedGeneration(rollout) if config.trainer.stream else None
        self._in_flight = ReadyGroups(rollout) if config.rollout.order == "ready" else self._stream or self.schedule
        self.lend = Lending(config, rollout, actor) if config.placement.lend and actor else None
        # The journal of rewards is open for one step at a time: greedy responses are scored with a batch that is lent.
        self._scores_at_once = has_own_pool(config, "reward") and not self.lend
        self.metrics: dict[str, Any] = {}

    def __call__(self, next_prompts: NextPrompts, step: int) -> ScoredParts:
        """Return `group_size` rows for each prompt, with responses and scores; `step` seeds their noise.

        They are in order, or with trainer.stream in parts as groups finish. With `algorithm.filter_groups`, return as
        many groups as prompts, only with differing scores (DAPO, https://arxiv.org/abs/2503.14476, equation 11).
        """
        self.metrics = {}
        prompts = next_prompts()
        begun = self.begin(prompts, step)
        if self.config.algorithm.filter_groups:
            batch, self.metrics = dynamic_sampling(self, begun, len(prompts), next_prompts)
            begun = Begun(step, (batch,))
        return self.score(begun)

    def begin(self, prompts: DataProto, step: int, first_group: int = 0) -> Begun | Running:
        """Begin to generate with the weights that the rollout engines have now; groups count from `first_group`.

        Rewards in processes of their own score as soon as responses are there.
        """
        config = self.config
        prompts = with_group_ids(prompts, first_group)
        prompts.meta_info["noise_key"] = [config.trainer.seed, TRAINING_STREAM, step]
        prompts, engines = self.schedule.scheduled(prompts)
        if self.lend:  # scored when it is complete, as its greedy responses
            lendable = self.lend.begin(prompts)
            return Begun(step, (lendable.rows,), self._greedy(prompts), lendable)
        if config.updates_in_flight:
            running = Running(step, begin_in_flight(config, self._in_flight, prompts, engines))
            if config.rollout.replay:
                return running
            return Begun(step, tuple(map(self._scored_at_once, running.parts)))
        if self._stream:
            greedy = self._greedy(prompts)  # before the others, since each part is compared with it
            return Begun(step, tuple(map(self._scored_at_once, self._stream(prompts, engines))), greedy)
        rollouts = self.schedule.generate(prompts, engines)  # group_size rows for each prompt, in order
        batch = self._scored_at_once(response_rows(prompts, config, config.rollout.group_size).union(rollouts))
        return Begun(step, (batch,), self._greedy(prompts))

    def score(self, begun: Begun | Running) -> ScoredParts:
        """Return the parts with scores, and `baseline_scores`: for each row that of the greedy response."""
        if self.lend and isinstance(begun, Begun):
            begun = self.lend(begun)
        return ScoredParts(begun, self._score)

    def _greedy(self, prompts: DataProto) -> DataProtoFuture | None:
        if not reads_column(self.config, "baseline_scores"):
            return None
        rollouts = self._rollout.generate_greedy_sequences.remote(prompts)
        return self._scored_at_once(DataProtoFuture.of(prompts).union(rollouts))

    def _score(self, begun: Begun | Running) -> Iterator[DataProtoFuture]:
        baseline = None
        for rows in begun.parts:
            part = self._with_scores(rows)
            if begun.greedy is not None:
                baseline = baseline or _scores_by_group(self._with_scores(begun.greedy))
                groups = read(part, ("group_ids",)).batch["group_ids"].tolist()
                part = part.union(DataProto.from_dict({"baseline_scores": torch.stack([baseline[g] for g in groups])}))
            yield part

    def _scored_at_once(self, rows: DataProtoFuture) -> DataProtoFuture:
        return self._with_scores(rows) if self._scores_at_once else rows

    def _with_scores(self, rows: DataProtoFuture) -> DataProtoFuture:
        if "scores" in (rows.columns or ()):
            return rows
        if not hasattr(self._rewards, "begin_score"):
            return rows.union(self._rewards.score.remote(rows))
        return rows.union(self._rewards.finish_score.remote(self._rewards.begin_score.remote(rows)))


def response_rows(prompts: DataProto, config: Config, group_size: int) -> DataProto:
    """Return a row for each row of the responses to the prompts, `group_size` for each; episodes have own prompts."""
    if config.environment.classes:
        tensors = sorted({*prompts.batch.keys()} - {"prompts", "prompt_mask"})
        prompts = prompts.select(tensors, sorted({*prompts.non_tensor_batch} - {"prompt_texts"}))
    return prompts.repeat(group_size * config.rows_per_episode, interleave=True)


def _scores_by_group(batch: DataProtoFuture) -> dict[int, torch.Tensor]:
    columns = read(batch, ("group_ids", "scores")).batch
    return dict(zip(columns["group_ids"].tolist(), columns["scores"], strict=True))
