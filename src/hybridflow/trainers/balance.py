"""Load balancing: an order of the rows of a batch whose parts take equally long."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hybridflow.algorithms import balanced_partition, imbalance, proportional_partition
from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.controller.part_sizes import BALANCED_PART_SIZES
from hybridflow.protocol import DataProtoFuture
from hybridflow.trainers.read_columns import Batch, read, row_lengths
from hybridflow.trainers.stages import mini_batch_rows

CostsOf = Callable[[Sequence[int]], Sequence[float]]
"""Returns the cost of each row by its number of tokens, in any unit."""


def balanced(
    batch: DataProtoFuture,
    group: WorkerGroup,
    groups: Iterable[WorkerGroup],
    config: Config,
    seed_keys: tuple[int, ...],
    costs_of: CostsOf,
) -> tuple[DataProtoFuture, np.ndarray, dict[str, float]]:
    """Return the rows in an order that balances the ranks of a group, the row numbers of the old order, and metrics.

    If the ranks have shares, the sizes of the parts go along, for all of `groups` that have the same ones.
    """
    num_parts, keep_groups = group.mesh().axes["data"], config.controller.balance == "groups"
    if num_parts == 1 or config.controller.balance == "none":
        return batch, np.arange(len(batch)), {}
    shares = group.shares.of_ranks
    steps = mini_batch_rows(batch, config.actor.mini_batch_size, 1, seed_keys)
    order, sizes, metrics = balanced_order(
        batch, num_parts, steps, costs_of, keep_groups=keep_groups, shares=shares and shares.values
    )
    batch = batch.select_rows(order)
    if shares and all(sizes):  # otherwise there are fewer rows than parts, and the batch is padded
        names = [other.name for other in groups if other.shares.of_ranks is shares]
        batch = batch.with_meta_info({BALANCED_PART_SIZES: dict.fromkeys(names, sizes)})
    return batch, np.argsort(order), metrics


def balanced_order(
    batch: Batch,
    num_parts: int,
    mini_batches: Sequence[Sequence[int]],
    costs_of: CostsOf,
    *,
    keep_groups: bool = False,
    shares: Sequence[float] | None = None,
) -> tuple[np.ndarray, list[int], dict[str, float]]:
    """Return the row numbers of `batch` in their new order, the rows of each part, and the metrics `balance/...`.

    Each optimizer step waits for its slowest rank, so each mini-batch is partitioned separately, into parts with equal
    numbers of rows (or of groups, with `keep_groups`). With `shares` of ranks of unequal speed, the costs of the parts
    are proportional to them instead. `mini_batches` lists row ids.
    """
    columns = read(batch, ("group_ids", "row_ids")).batch
    costs = np.array(costs_of(row_lengths(batch).tolist()), dtype=float)
    groups, row_of = columns["group_ids"].tolist(), {int(id_): row for row, id_ in enumerate(columns["row_ids"])}
    parts: list[list[list[int]]] = [[] for _ in range(num_parts)]  # of units: rows, or groups of rows
    for members in mini_batches:  # each is divided over all parts: ranks wait for each other after every one
        units: dict[int, list[int]] = {}
        for row in sorted(row_of[id_] for id_ in members):
            units.setdefault(groups[row] if keep_groups else row, []).append(row)
        rows = list(units.values())
        if shares is None:
            _add_equally_many(parts, rows, costs)
        else:
            of_parts = proportional_partition([costs[unit].sum() for unit in rows], shares)
            for part, indices in zip(parts, of_parts, strict=True):
                part += [rows[index] for index in indices]
    if shares is None:
        parts.sort(key=_num_rows, reverse=True)  # dispatch gives the first ranks one unit more
    if sum(map(len, parts)) >= num_parts:
        for empty in (part for part in parts if not part):  # of a very slow rank, which must be measured again
            empty.append(max(parts, key=len).pop())
    flat = [[row for unit in part for row in unit] for part in parts]
    sizes = [len(part) for part in flat]
    order = np.array([row for part in flat for row in part], dtype=np.int64)
    own_rows = [np.array([row_of[id_] for id_ in members]) for members in mini_batches]
    # What each rank would have without an order, and what it has: consecutive slices of the batch.
    before, after = (np.split(rows, np.cumsum(sizes)[:-1]) for rows in (np.arange(len(order)), order))
    return (
        order,
        sizes,
        {
            "balance/imbalance_before": _mean_imbalance(costs, before, own_rows, shares),
            "balance/imbalance_after": _mean_imbalance(costs, after, own_rows, shares),
        },
    )


def _add_equally_many(parts: list[list[list[int]]], units: list[list[int]], costs: np.ndarray) -> None:
    """Add the units of a mini-batch to the parts, to each as many; the parts with fewer rows get one more."""
    partition = balanced_partition([costs[unit].sum() for unit in units], len(parts), equal_counts=True)
    more = [[units[index] for index in indices] for indices in partition]
    more.sort(key=_num_rows, reverse=True)
    for part, of_mini_batch in zip(sorted(parts, key=_num_rows), more, strict=True):  # parts change in place
        part += of_mini_batch


def _num_rows(units: list[list[int]]) -> int:
    return sum(map(len, units))


def _mean_imbalance(
    costs: np.ndarray, parts: list[np.ndarray], mini_batches: list[np.ndarray], shares: Sequence[float] | None
) -> float:
    """Return the mean imbalance of the mini-batches if each rank gets the rows of one part."""
    of_each = [
        imbalance(costs.tolist(), [np.intersect1d(part, rows).tolist() for part in parts], shares)
        for rows in mini_batches
    ]
    return float(np.mean(of_each))
