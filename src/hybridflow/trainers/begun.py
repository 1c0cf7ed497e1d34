"""What sampling returns: batches whose generation has begun, in one part or several, and their parts with scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hybridflow.controller.part_sizes import PART_SIZES
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.in_flight import Running
from hybridflow.trainers.reading import read

NextPrompts = Callable[[], DataProto]
"""A function that returns the next batch of prompts."""


@dataclass(frozen=True)
class Lendable:
    """Prompts that have begun in the rollout engines, and the rows of the batch; see `Lending`.

    `begun`: the result of `begin_sequences`.
    """

    prompts: DataProto
    begun: DataProtoFuture
    rows: DataProtoFuture


@dataclass(frozen=True)
class Begun:
    """A batch of step `step` whose generation has begun: `group_size` rows for each prompt.

    `parts`: the whole batch, or with trainer.stream its groups in the order in which they finish. They have scores if
    rewards run in processes of their own; others are scored when they are read.
    `greedy`: the greedy response to each prompt, if the advantage estimator compares with its score.
    `lendable`: the same batch, as long as its groups that wait may be lent (placement.lend); `num_lent`: how many were.
    """

    step: int
    parts: tuple[DataProtoFuture, ...]
    greedy: DataProtoFuture | None = None
    lendable: Lendable | None = None
    num_lent: int = 0


class ScoredParts:
    """The parts of a begun batch by `score`, which computes the scores of a part when the iteration gets to it."""

    def __init__(self, begun: Begun | Running, score: Callable[[Any], Iterator[DataProtoFuture]]) -> None:
        self._begun, self._score = begun, score

    @property
    def num_rows(self) -> int:
        """The number of rows of all parts."""
        return sum(map(len, self._begun.parts))

    def __len__(self) -> int:
        return len(self._begun.parts)

    def __iter__(self) -> Iterator[DataProtoFuture]:
        return self._score(self._begun)


class SampledParts(Protocol):
    """The parts of a batch with scores, each computed when the iteration gets to it."""

    @property
    def num_rows(self) -> int:
        """The number of rows of all parts."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[DataProtoFuture]: ...


class Sampler(Protocol):
    """A function that returns the parts of the batch of a step; `metrics` are of the last call."""

    metrics: dict[str, Any]

    def __call__(self, next_prompts: NextPrompts, step: int) -> SampledParts:
        """Return the rows of `step` with responses and scores, in one part or several."""
        ...


def joined(parts: Sequence[DataProtoFuture]) -> DataProtoFuture:
    """Return the rows of all parts of a batch, in order."""
    if len(parts) == 1:
        return parts[0]
    return DataProtoFuture.concat([part.with_meta_info({PART_SIZES: {}}) for part in parts])


def in_order_of_groups(batch: DataProtoFuture) -> np.ndarray:
    """Return the row numbers that sort the batch by group, and the rows of a group by `row_ids`."""
    columns = read(batch, ("group_ids", "row_ids")).batch
    return np.lexsort((columns["row_ids"].numpy(), columns["group_ids"].numpy()))
