"""From prompts to scored responses, in one round of generation or several (dynamic sampling)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.in_flight import Running
from hybridflow.trainers.stages import read, with_group_ids
from hybridflow.workers.algorithm_functions import reads_column

TRAINING_STREAM = 0
"""Second entry of the noise key of training; validation has its own."""

NextPrompts = Callable[[], DataProto]
"""A function that returns the next batch of prompts."""


@dataclass(frozen=True)
class Begun:
    """A batch of step `step` whose generation has begun: `group_size` rows for each prompt, without scores.

    `greedy`: the greedy response to each prompt, if the advantage estimator compares with its score.
    """

    step: int
    rollouts: DataProtoFuture
    greedy: DataProtoFuture | None = None


class Sampler(Protocol):
    """A function that returns the batch of a step; `metrics` are of the last call."""

    metrics: dict[str, Any]

    def __call__(self, next_prompts: NextPrompts, step: int) -> DataProtoFuture:
        """Return the rows of `step` with responses and scores."""
        ...


class Sampling:
    """Sampling of `rollout.group_size` responses to each prompt, with scores. `metrics` are of the last call."""

    def __init__(self, config: Config, rollout: WorkerGroup, rewards: WorkerGroup) -> None:
        self._config, self._rollout, self._rewards = config, rollout, rewards
        self.metrics: dict[str, Any] = {}

    def __call__(self, next_prompts: NextPrompts, step: int) -> DataProtoFuture:
        """Return `group_size` rows for each prompt, in order, with responses and scores; `step` seeds their noise.

        With `algorithm.filter_groups`, return as many groups as prompts, only with differing scores (DAPO,
        https://arxiv.org/abs/2503.14476, equation 11).
        """
        self.metrics = {}
        prompts = next_prompts()
        batch = self.score(self.begin(prompts, step))
        if self._config.algorithm.filter_groups:
            batch = self._filtered(batch, len(prompts), next_prompts, step)
        return batch

    def begin(self, prompts: DataProto, step: int, first_group: int = 0) -> Begun | Running:
        """Begin to generate with the weights that the rollout engines have now; groups count from `first_group`."""
        config = self._config
        prompts = with_group_ids(prompts, first_group)
        prompts.meta_info["noise_key"] = [config.trainer.seed, TRAINING_STREAM, step]
        if config.updates_in_flight:
            begun = Running(step, self._rollout, self._rollout.begin_sequences.remote(prompts), prompts)
            return begun if config.rollout.replay else Begun(step, begun.rollouts)
        rollouts = self._rollout.generate_sequences.remote(prompts)  # group_size rows for each prompt, in order
        batch = prompts.repeat(config.rollout.group_size, interleave=True).union(rollouts)
        if not reads_column(config, "baseline_scores"):
            return Begun(step, batch)
        return Begun(step, batch, prompts.union(self._rollout.generate_greedy_sequences.remote(prompts)))

    def score(self, begun: Begun | Running) -> DataProtoFuture:
        """Return the batch with scores, and `baseline_scores`: for each row that of the greedy response."""
        batch = begun.rollouts.union(self._rewards.score.remote(begun.rollouts))
        if begun.greedy is None:
            return batch
        scores = read(self._rewards.score.remote(begun.greedy), ("scores",)).batch["scores"]
        baseline = scores.repeat_interleave(self._config.rollout.group_size)
        return batch.union(DataProto.from_dict({"baseline_scores": baseline}))

    def _filtered(
        self, batch: DataProtoFuture, num_groups: int, next_prompts: NextPrompts, step: int
    ) -> DataProtoFuture:
        """Sample until `num_groups` groups have differing scores or rounds run out; then fill up with others."""
        limit = self._config.algorithm.max_sampling_rounds
        rounds, differing = [batch], [_differing_groups(batch)]
        while sum(map(np.count_nonzero, differing)) < num_groups and len(rounds) < limit:
            begun = self.begin(next_prompts(), step, first_group=sum(map(len, differing)))
            rounds.append(self.score(begun))
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
