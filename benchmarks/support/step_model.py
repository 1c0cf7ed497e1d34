"""The time of a step without overheads and weight sync, calculated from the lengths of the responses."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil

import numpy as np

from hybridflow.algorithms import balanced_partition
from hybridflow.trainers.sampling.generation import streamed_part_sizes
from hybridflow.trainers.sampling.sampling import TRAINING_STREAM
from support.waiting_workers import STEP_S, TOKEN_S, response_length

PROMPTS_PER_ENGINE, GROUP_SIZE, PROMPT_LEN = 8, 4, 2
REWARD_S, CONCURRENCY = 0.05, 64
"""Seconds of a reward, and the number that run at the same time."""

Groups = Sequence[Sequence[int]]
"""The response lengths of each group."""


def batch_of(seed: int, step: int, num_engines: int, longest: int) -> list[Groups]:
    """Return the response lengths of a step, for each engine and group."""
    return [
        [
            [response_length((seed, TRAINING_STREAM, step, prompt), index, longest) for index in range(GROUP_SIZE)]
            for prompt in range(engine * PROMPTS_PER_ENGINE, (engine + 1) * PROMPTS_PER_ENGINE)
        ]
        for engine in range(num_engines)
    ]


@dataclass(frozen=True)
class StepModel:
    """A step on a batch with these response lengths of each engine; `num_ranks` train. Times are in seconds."""

    engines: Sequence[Groups]
    num_ranks: int

    @property
    def generation(self) -> list[float]:
        """The time of each engine, which ends with its longest response."""
        return [STEP_S * max(map(max, groups)) for groups in self.engines]

    @property
    def training(self) -> float:
        """The time of training, on ranks with equally many tokens."""
        return TOKEN_S * sum(map(sum, map(_tokens, self.engines))) / self.num_ranks

    @property
    def bound(self) -> float:
        """The larger one of the times of generation and training."""
        return max(*self.generation, self.training)

    @property
    def sync(self) -> float:
        """The time of generation, rewards and training, one after another."""
        return max(self.generation) + _reward_s(sum(map(len, map(_tokens, self.engines)))) + self.training

    def streamed(self, *, balanced: bool = True) -> float:
        """Return the time with trainer.stream.

        A part is generated when its longest response is, and then scored, beside others. The ranks train on one part
        after another, each on equally many rows of it: balanced by their tokens, or in the order of generation.
        """
        trained = 0.0
        for part in zip_longest(*map(_parts, self.engines), fillvalue=()):
            tokens = [count for groups in part for count in _tokens(groups)]
            scored = STEP_S * (max(tokens) - PROMPT_LEN) + _reward_s(len(tokens))
            if balanced:
                ranks = balanced_partition(tokens, self.num_ranks, equal_counts=True)
            else:
                ranks = np.array_split(np.arange(len(tokens)), self.num_ranks)
            trained = max(trained, scored) + TOKEN_S * max(sum(tokens[row] for row in rank) for rank in ranks)
        return trained


def _reward_s(num_rows: int) -> float:
    return REWARD_S * ceil(num_rows / CONCURRENCY)


def _tokens(groups: Groups) -> list[int]:
    """Return the tokens of each row, with those of its prompt."""
    return [PROMPT_LEN + length for group in groups for length in group]


def _parts(groups: Groups) -> list[Groups]:
    """Return the groups of each part of an engine: those that finish next."""
    finishing, parts = sorted(groups, key=max), []
    for size in streamed_part_sizes(len(groups)):
        parts.append(finishing[:size])
        finishing = finishing[size:]
    return parts
