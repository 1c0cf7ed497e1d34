"""The time of a step with `trainer.stream` without overheads, calculated from the lengths of the responses."""

from collections.abc import Sequence
from itertools import zip_longest
from math import ceil

from hybridflow.algorithms import balanced_partition
from hybridflow.trainers.streamed_generation import part_sizes
from support.waiting_workers import STEP_S, TOKEN_S


def streamed_s(
    engines: Sequence[Sequence[Sequence[int]]], prompt_len: int, num_ranks: int, reward_s: float, concurrency: int
) -> float:
    """Return the seconds of a step.

    `engines`: for each engine the response lengths of each group. A part is generated when its longest response is, and
    scored `concurrency` rows at a time after the part before it. The ranks train on one part after another, each part
    split over them in equal numbers of rows with about equal numbers of tokens.
    """
    scored = trained = 0.0
    for groups in zip_longest(*map(_parts, engines), fillvalue=()):
        rows = [length for engine in groups for group in engine for length in group]
        scored = max(scored, STEP_S * max(rows)) + reward_s * ceil(len(rows) / concurrency)
        tokens = [prompt_len + length for length in rows]
        ranks = balanced_partition(tokens, num_ranks, equal_counts=True)
        trained = max(trained, scored) + TOKEN_S * max(sum(tokens[row] for row in rank) for rank in ranks)
    return trained


def _parts(groups: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return the groups of each part of an engine: those that finish next."""
    finishing, parts = sorted(groups, key=max), []
    for size in part_sizes(len(groups)):
        parts.append(finishing[:size])
        finishing = finishing[size:]
    return parts
