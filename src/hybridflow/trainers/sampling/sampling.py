"""From prompts to scored responses, in one round of generation or several (dynamic sampling)."""

from collections.abc import Iterator
from typing import Any

import torch

from hybridflow.config import Config
from hybridflow.config.roles import has_own_pool
from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.protocol.meta_info import NOISE_KEY
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.sampling.dynamic_sampling import dynamic_sampling
from hybridflow.trainers.sampling.generation import Begun, generation_of, response_rows
from hybridflow.trainers.sampling.sampled import NextPrompts, Sampled
from hybridflow.trainers.stages import with_group_ids
from hybridflow.workers.algorithm_functions import reads_column

TRAINING_STREAM = 0
"""Second entry of the noise key of training; validation has its own."""


class Sampling:
    """Sampling of `rollout.group_size` responses to each prompt, with scores. `metrics` are of the last call."""

    def __init__(self, config: Config, rollout: WorkerGroup, rewards: WorkerGroup) -> None:
        self.config, self._rollout, self._rewards = config, rollout, rewards
        self._generation = generation_of(config, rollout)
        self._has_own_pool = has_own_pool(config, "reward")
        self.metrics: dict[str, Any] = {}

    def __call__(self, next_prompts: NextPrompts, step: int) -> Sampled:
        """Return `group_size` rows for each prompt, with responses and scores; `step` seeds their noise."""
        return self.finish(self.begin(next_prompts(), step), next_prompts)

    def finish(self, begun: Begun, next_prompts: NextPrompts) -> Sampled:
        """Return a batch that has begun, with scores.

        With `algorithm.filter_groups` return as many groups, only with differing scores, in exchange for which further
        prompts are sampled (DAPO, https://arxiv.org/abs/2503.14476, equation 11).
        """
        self.metrics = {}
        if self.config.algorithm.filter_groups:
            batch, self.metrics = dynamic_sampling(self, begun, next_prompts)
            begun = Begun(begun.step, lambda: (batch,))
        return self.score(begun)

    def begin(self, prompts: DataProto, step: int, first_group: int = 0) -> Begun:
        """Begin to generate with the weights that the rollout engines have now; groups count from `first_group`.

        Rewards in processes of their own score as soon as responses are there.
        """
        prompts = with_group_ids(prompts, first_group)
        prompts.meta_info[NOISE_KEY] = [self.config.trainer.seed, TRAINING_STREAM, step]
        greedy = self._greedy(prompts)
        ticket = self._generation.begin(prompts)
        begun = Begun(step, lambda: tuple(map(self._scored_at_once, self._generation.take(ticket))), greedy)
        if not self.config.rollout.replay:  # in one process, a replay generates a batch when it is read
            _ = begun.parts
        return begun

    def score(self, begun: Begun) -> Sampled:
        """Return the batch with scores, and `baseline_scores`: for each row that of the greedy response."""
        return Sampled(len(begun.parts), sum(map(len, begun.parts)), self._score(begun))

    def _greedy(self, prompts: DataProto) -> DataProtoFuture | None:
        if not reads_column(self.config, "baseline_scores"):
            return None
        rollouts = self._rollout.generate_greedy_sequences.remote(prompts)
        return self._scored_at_once(response_rows(prompts, self.config, group_size=1).union(rollouts))

    def _score(self, begun: Begun) -> Iterator[DataProtoFuture]:
        baseline = None
        for rows in begun.parts:
            part = self._with_scores(rows)
            if begun.greedy is not None:
                baseline = baseline or _scores_by_group(self._with_scores(begun.greedy))
                groups = read(part, ("group_ids",)).batch["group_ids"].tolist()
                part = part.union(DataProto.from_dict({"baseline_scores": torch.stack([baseline[g] for g in groups])}))
            yield part

    def _scored_at_once(self, rows: DataProtoFuture) -> DataProtoFuture:
        return self._with_scores(rows) if self._has_own_pool else rows

    def _with_scores(self, rows: DataProtoFuture) -> DataProtoFuture:
        if "scores" in (rows.columns or ()):
            return rows
        if not hasattr(self._rewards, "begin_score"):
            return rows.union(self._rewards.score.remote(rows))
        return rows.union(self._rewards.finish_score.remote(self._rewards.begin_score.remote(rows)))


def _scores_by_group(batch: DataProtoFuture) -> dict[int, torch.Tensor]:
    columns = read(batch, ("group_ids", "scores")).batch
    return dict(zip(columns["group_ids"].tolist(), columns["scores"], strict=True))
