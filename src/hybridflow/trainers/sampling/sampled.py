"""The scored batch of a step, in one part or several."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hybridflow.controller.part_sizes import BALANCED_PART_SIZES
from hybridflow.protocol import DataProto, DataProtoFuture
from hybridflow.trainers.read_columns import read

NextPrompts = Callable[[], DataProto]
"""A function that returns the next batch of prompts."""


@dataclass(frozen=True)
class Sampled:
    """The batch of a step: `group_size` rows for each prompt, with scores.

    Iterate once, over one part in the order of prompts, or with trainer.stream over parts in the order in which groups
    finish; a part is scored when the iteration gets to it. `num_rows`: of all parts.
    """

    num_parts: int
    num_rows: int
    parts: Iterator[DataProtoFuture]

    def __iter__(self) -> Iterator[DataProtoFuture]:
        return self.parts


class Sampler(Protocol):
    """A function that returns the batch of a step; `metrics` are of the last call."""

    metrics: dict[str, Any]

    def __call__(self, next_prompts: NextPrompts, step: int) -> Sampled:
        """Return the rows of `step` with responses and scores."""
        ...


def joined(parts: Sequence[DataProtoFuture]) -> DataProtoFuture:
    """Return the rows of all parts of a batch, in order."""
    if len(parts) == 1:
        return parts[0]
    return DataProtoFuture.concat([part.with_meta_info({BALANCED_PART_SIZES: {}}) for part in parts])


def in_order_of_groups(batch: DataProtoFuture) -> DataProtoFuture:
    """Return the batch sorted by group, and the rows of a group by `row_ids`, without these: they tell parts apart."""
    columns = read(batch, ("group_ids", "row_ids")).batch
    order = np.lexsort((columns["row_ids"].numpy(), columns["group_ids"].numpy()))
    return batch.select_columns([name for name in batch.columns or () if name != "row_ids"]).select_rows(order)
