"""Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476, equation 11): rounds of generation until scores differ."""

from typing import Protocol

import numpy as np
import torch

from hybridflow.config import Config
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.read_columns import read
from hybridflow.trainers.sampling.generation import Begun
from hybridflow.trainers.sampling.sampled import NextPrompts, Sampled, joined


class Rounds(Protocol):
    """The object that begins and scores a round, such as `Sampling`."""

    config: Config

    def begin(self, prompts: DataProto, step: int, first_group: int = 0) -> Begun:
        """Begin to generate a round, whose groups count from `first_group`."""
        ...

    def score(self, begun: Begun) -> Sampled:
        """Return the round with scores."""
        ...


def dynamic_sampling(
    sampling: Rounds, first: Begun, next_prompts: NextPrompts
) -> tuple[DataProtoFuture, dict[str, float]]:
    """Sample until as many groups as a round has have differing scores, or rounds run out; then fill up with others.

    Return the chosen groups, in order, and metrics. `first`: the first round, which has begun; with trainer.lag the
    others begin with newer weights.
    """
    config = sampling.config
    rounds = [_in_order(sampling.score(first))]
    differing = [_differing_groups(rounds[0])]
    num_groups = len(differing[0])
    while sum(map(np.count_nonzero, differing)) < num_groups and len(rounds) < config.algorithm.max_sampling_rounds:
        begun = sampling.begin(next_prompts(), first.step, first_group=sum(map(len, differing)))
        rounds.append(_in_order(sampling.score(begun)))
        differing.append(_differing_groups(rounds[-1]))
    differs = np.concatenate(differing)
    kept = np.flatnonzero(differs)[:num_groups]
    filling = np.flatnonzero(~differs)[: num_groups - len(kept)]
    metrics = {
        "sampling/rounds": float(len(rounds)),
        "sampling/differing_groups": float(differs.mean()),
        "sampling/filled_groups": len(filling) / num_groups,
    }
    groups = np.sort(np.concatenate([kept, filling]))
    size = config.rollout.group_size * config.rows_per_episode
    rows = (groups[:, None] * size + np.arange(size)).ravel()
    return joined(rounds).select_rows(rows), metrics


def _in_order(sampled: Sampled) -> DataProtoFuture:
    """Return the rows of a round in the order of groups, so that those which finish first are not preferred."""
    parts = list(sampled)
    rows = joined(parts)
    if len(parts) == 1:
        return rows
    return rows.select_rows(read(rows, ("group_ids",)).batch["group_ids"].argsort(stable=True).numpy())


def _differing_groups(batch: DataProtoFuture) -> np.ndarray:
    """Return for each group, in order, whether its scores differ."""
    columns = read(batch, ("scores", "group_ids")).batch
    _, counts = torch.unique_consecutive(columns["group_ids"], return_counts=True)
    groups = columns["scores"].split(counts.tolist())
    return np.array([bool((scores != scores[0]).any()) for scores in groups])
