"""Load balancing: an order of the rows of a batch whose parts take equally long."""

from collections.abc import Sequence

import numpy as np

from hybridflow.algorithms import balanced_partition, imbalance
from hybridflow.models import DecoderShape, sequence_costs
from hybridflow.trainers.stages import Batch, read


def balanced_order(
    batch: Batch,
    num_parts: int,
    mini_batches: Sequence[Sequence[int]],
    shape: DecoderShape | None,
    *,
    keep_groups: bool = False,
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the row numbers of `batch` in their new order, and the metrics `balance/...`.

    Each optimizer step waits for its slowest rank, so each mini-batch is partitioned separately, into parts with equal
    numbers of rows (or of groups, with `keep_groups`). `mini_batches` lists row ids.
    """
    columns = read(batch, ("prompt_mask", "response_mask", "group_ids", "row_ids")).batch
    lengths = columns["prompt_mask"].sum(-1) + columns["response_mask"].sum(-1)
    costs = np.array(sequence_costs(shape, lengths.tolist()))
    groups, row_of = columns["group_ids"].tolist(), {int(id_): row for row, id_ in enumerate(columns["row_ids"])}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for members in mini_batches:
        units: dict[int, list[int]] = {}
        for row in sorted(row_of[id_] for id_ in members):
            units.setdefault(groups[row] if keep_groups else row, []).append(row)
        rows = list(units.values())
        partition = balanced_partition([costs[unit].sum() for unit in rows], num_parts, equal_counts=True)
        shares = [[row for unit in part for row in rows[unit]] for part in partition]
        shares.sort(key=len, reverse=True)
        for part, more in zip(sorted(parts, key=len), shares, strict=True):  # parts change in place
            part += more
    parts.sort(key=len, reverse=True)  # dispatch gives the first ranks one row or group more
    order = np.array([row for part in parts for row in part], dtype=np.int64)
    own_rows = [np.array([row_of[id_] for id_ in members]) for members in mini_batches]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return order, {
        "balance/imbalance_before": _mean_imbalance(costs, np.split(np.arange(len(order)), ends), own_rows),
        "balance/imbalance_after": _mean_imbalance(costs, np.split(order, ends), own_rows),
    }


def _mean_imbalance(costs: np.ndarray, parts: list[np.ndarray], mini_batches: list[np.ndarray]) -> float:
    """Return the mean imbalance of the mini-batches if each rank gets the rows of one part."""
    of_each = [imbalance(costs.tolist(), [np.intersect1d(p, rows).tolist() for p in parts]) for rows in mini_batches]
    return float(np.mean(of_each))
