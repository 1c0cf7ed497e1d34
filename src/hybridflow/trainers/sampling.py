"""From prompts to scored responses, in one round of generation or several (dynamic sampling)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.stages import read, with_group_ids
from hybridflow.workers.algorithm_functions import reads_column

TRAINING_STREAM = 0
"""Second entry of the noise key of training; validation has its own."""

MorePrompts = Callable[[], DataProto]
"""A function that returns the next batch of prompts, for dynamic sampling."""


class Sampling:
    """Sampling of `rollout.group_size` responses to each prompt, with scores. `metrics` are of the last call."""

    def __init__(self, config: Config, rollout: WorkerGroup, rewards: WorkerGroup) -> None:
        self._config, self._rollout, self._rewards = config, rollout, rewards
        self.metrics: dict[str, Any] = {}

    def __call__(self, prompts: DataProto, more_prompts: MorePrompts | None, step: int) -> DataProtoFuture:
        """Return `group_size` rows for each prompt, in order, with responses and scores; `step` seeds their noise.

        With `algorithm.filter_groups`, return as many groups as prompts, only with differing scores (DAPO,
        https://arxiv.org/abs/2503.14476, equation 11).
        """
        self.metrics = {}
        prompts = with_group_ids(prompts)
        batch = self._round(prompts, step)
        if self._config.algorithm.filter_groups:
            batch = self._filtered(batch, len(prompts), more_prompts, step)
        return batch

    def _round(self, prompts: DataProto, step: int) -> DataProtoFuture:
        config = self._config
        prompts.meta_info["noise_key"] = [config.trainer.seed, TRAINING_STREAM, step]
        rollouts = self._rollout.generate_sequences.remote(prompts)  # group_size rows for each prompt, in order
        batch = prompts.repeat(config.rollout.group_size, interleave=True).union(rollouts)
        batch = batch.union(self._rewards.score.remote(batch))
        if reads_column(config, "baseline_scores"):
            batch = batch.union(self._baseline_scores(prompts))
        return batch

    def _baseline_scores(self, prompts: DataProto) -> DataProto:
        """Return `baseline_scores`: for each row the score of the greedy response to its prompt."""
        greedy = prompts.union(self._rollout.generate_greedy_sequences.remote(prompts))
        scores = read(self._rewards.score.remote(greedy), ("scores",)).batch["scores"]
        return DataProto.from_dict({"baseline_scores": scores.repeat_interleave(self._config.rollout.group_size)})

    def _filtered(
        self, batch: DataProtoFuture, num_groups: int, more_prompts: MorePrompts | None, step: int
    ) -> DataProtoFuture:
        """Sample until `num_groups` groups have differing scores or rounds run out; then fill up with others."""
        limit = self._config.algorithm.max_sampling_rounds if more_prompts else 1
        rounds, differing = [batch], [_differing_groups(batch)]
        while sum(map(np.count_nonzero, differing)) < num_groups and len(rounds) < limit:
            assert more_prompts is not None
            prompts = with_group_ids(more_prompts(), first=sum(map(len, differing)))
            rounds.append(self._round(prompts, step))
            differing.append(_differing_groups(rounds[-1]))
        differs = np.concatenate(differing)
        kept = np.flatnonzero(differs)[:num_groups]
        filling = np.flatnonzero(~differs)[: num_groups - len(kept)]
        self.metrics = {
            "sampling/rounds": float(len(rounds)),
            "sampling/differing_groups": float(differs.mean()),
            "sampling/filled_groups": len(filling) / num_groups,
        }
        groups = np.sort(np.concatenate([kept, filling]))
        size = self._config.rollout.group_size
        rows = (groups[:, None] * size + np.arange(size)).ravel()
        return (DataProtoFuture.concat(rounds) if len(rounds) > 1 else batch).select_rows(rows)


def _differing_groups(batch: DataProtoFuture) -> np.ndarray:
    """Return for each group, in order, whether its scores differ."""
    columns = read(batch, ("scores", "group_ids")).batch
    _, counts = torch.unique_consecutive(columns["group_ids"], return_counts=True)
    groups = columns["scores"].split(counts.tolist())
    return np.array([bool((scores != scores[0]).any()) for scores in groups])
