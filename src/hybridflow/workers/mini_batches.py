"""The optimizer steps of one update call: which rows, and the global counts their losses are divided by.

The controller names the rows of each mini-batch by global row id in `meta_info["mini_batches"]`; a rank takes those
it holds. Padded copies have row id -1 and belong to none.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybridflow.engines import TrainEngine
from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto


@dataclass(frozen=True)
class MiniBatch:
    """This rank's rows of one optimizer step, with the response tokens and the sequences of all ranks."""

    rows: DataProto
    num_tokens: int
    num_sequences: int


def iterate_mini_batches(batch: DataProto, engine: TrainEngine) -> Iterator[MiniBatch]:
    """The mini-batches of `batch.meta_info["mini_batches"]` in order, each with its rows in the batch's order.

    Raises BatchError if the batch names none, or names rows that no rank holds, or that several do.
    """
    memberships = batch.meta_info.get("mini_batches")
    if not memberships:
        raise BatchError("an update needs meta_info['mini_batches'], a list of row ids for each optimizer step.")
    row_ids = batch.batch["row_ids"]
    for members in memberships:
        rows = batch.select_idxs(torch.isin(row_ids, torch.as_tensor(members)))
        if (num_rows := engine.all_reduce_sum(len(rows))) != len(members):
            raise BatchError(
                f"a mini-batch names {len(members)} rows, but {num_rows} of the batch carry their row_ids; "
                "each must be there exactly once."
            )
        lengths = rows.batch["response_mask"].sum(-1)
        yield MiniBatch(
            rows, engine.all_reduce_sum(int(lengths.sum())), engine.all_reduce_sum(int((lengths > 0).sum()))
        )


def mean_metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """The mean over optimizer steps of each metric; a learning rate is that of the last step, a `_max` the largest."""

    def joined(name: str) -> float:
        values = [step[name] for step in steps]
        if name.endswith("/lr"):
            return values[-1]
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    return {name: joined(name) for name in steps[-1]}
