"""Batches whose generation has begun, in one part or several, and their parts with scores."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hybridflow.protocol import DataProtoFuture


@dataclass(frozen=True)
class Begun:
    """A batch of step `step` whose generation has begun: `group_size` rows for each prompt.

    `parts`: the whole batch, or with trainer.stream its groups in the order in which they finish. They have scores if
    rewards run in processes of their own; others are scored when they are read.
    `greedy`: the greedy response to each prompt, if the advantage estimator compares with its score.
    """

    step: int
    parts: tuple[DataProtoFuture, ...]
    greedy: DataProtoFuture | None = None


class ScoredParts:
    """The parts of a begun batch by `score`, which computes the scores of a part when the iteration gets to it."""

    def __init__(self, begun: Begun, score: Callable[[Begun], Iterator[DataProtoFuture]]) -> None:
        self._begun, self._score = begun, score

    @property
    def num_rows(self) -> int:
        """The number of rows of all parts."""
        return sum(map(len, self._begun.parts))

    def __len__(self) -> int:
        return len(self._begun.parts)

    def __iter__(self) -> Iterator[DataProtoFuture]:
        return self._score(self._begun)
