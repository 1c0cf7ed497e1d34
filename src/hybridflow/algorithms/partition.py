"""Partition of rows with different costs into parts of nearly equal cost.

The better of two starts, by differencing (Karmarkar and Karp, 1982) and greedy, is improved by swaps between heavy and
light parts until no swap helps. The result is deterministic.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from hybridflow.algorithms.guards import require_count
from hybridflow.errors import AlgorithmError

TOLERANCE = 5e-4
"""Relative excess of the heaviest part over the mean at which swaps stop, for many items in parts of equal counts."""

MANY = 4096
"""Number of items above which TOLERANCE applies; fewer items are swapped until no swap helps."""

GREEDY_BLOCKS = 16
"""Number of the costliest blocks that are assigned greedily; the others matter less."""

DIFFERENCING_LIMIT = 512
"""Maximum number of merges of differencing; beyond it the greedy start is as good and faster."""

MAX_ROUNDS = 256

_Slots = np.ndarray
"""(parts, slots): indices of items; the index `len(costs)` is an empty slot of cost 0."""


def balanced_partition(costs: Sequence[float], num_parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Return the indices of each part, ascending, each index once, with part costs as equal as the search finds.

    With `equal_counts` the numbers of items differ by at most one. With fewer items than parts some parts are empty.
    Raises AlgorithmError for a cost that is negative or not finite, or for fewer than one part.
    """
    require_count("balanced_partition", "num_parts", num_parts, minimum=1)
    values = _require_costs("balanced_partition", costs)
    if not len(values):
        return [[] for _ in range(num_parts)]
    values = np.append(values, 0.0)  # cost of an empty slot
    starts = _equal_starts(values, num_parts) if equal_counts else _free_starts(values, num_parts)
    tolerance = TOLERANCE if len(values) > MANY else 0.0
    for slots in starts:
        if equal_counts:  # empty slots are the last ones, and items are only swapped with items
            full = int((slots < len(costs)).all(0).sum())
            slots[:, :full] = _swap(values, slots[:, :full], values[slots[:, full:]].sum(1), tolerance)
        else:
            _swap(values, slots, np.zeros(num_parts), 0.0)
    best = min(starts, key=lambda slots: float(values[slots].sum(1).max()))
    best.sort(axis=1)
    filled = (best < len(values) - 1).sum(1)
    return [part[:count].tolist() for part, count in zip(best, filled.tolist(), strict=True)]


def proportional_partition(costs: Sequence[float], shares: Sequence[float]) -> list[list[int]]:
    """Return the indices of each part, ascending, with part costs proportional to `shares` (> 0); some may be empty.

    Longest processing time first (Graham, 1969) for machines of unequal speeds: the costliest item goes first, to the
    part that is then least loaded for its share. Raises AlgorithmError for a cost that is negative or not finite.
    """
    values, of_parts = _require_costs("proportional_partition", costs), np.asarray(shares, dtype=np.float64)
    parts: list[list[int]] = [[] for _ in shares]
    loads = np.zeros(len(of_parts))
    for item in np.argsort(-values, kind="stable").tolist():
        part = int(((loads + values[item]) / of_parts).argmin())
        parts[part].append(item)
        loads[part] += values[item]
    return [sorted(part) for part in parts]


def imbalance(
    costs: Sequence[float], partition: Sequence[Sequence[int]], shares: Sequence[float] | None = None
) -> float:
    """Return the relative excess of the heaviest part over the mean, max / mean - 1; 0 if all costs are 0.

    With `shares`, the cost of a part counts relative to its share. Raises AlgorithmError for a cost that is negative or
    not finite.
    """
    values = _require_costs("imbalance", costs)
    sums = np.array([values[list(part)].sum() for part in partition])
    even = sums.sum() * (np.asarray(shares) / np.sum(shares) if shares else 1 / len(sums))
    return float((sums / even).max() - 1) if sums.any() else 0.0


def _require_costs(function: str, costs: object) -> np.ndarray:
    try:
        values = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.array(np.nan)
    with np.errstate(over="ignore"):
        valid = values.ndim == 1 and not (values < 0).any() and np.isfinite(values.sum())
    if not valid:
        raise AlgorithmError(f"{function}: costs must be a list of numbers of at least 0 with a finite sum.")
    return values


def _equal_starts(values: np.ndarray, num_parts: int) -> list[_Slots]:
    """Return starts in which each part gets one item of every block of `num_parts` items in descending order."""
    num_items = len(values) - 1
    num_blocks = -(-num_items // num_parts)
    order = np.full(num_blocks * num_parts, num_items)
    order[:num_items] = np.argsort(-values[:-1])
    blocks = order.reshape(num_blocks, num_parts)
    starts = [_greedy(values, blocks)]
    if num_blocks <= DIFFERENCING_LIMIT // num_parts:
        starts.append(_differencing(values, list(blocks[:, :, None])))
    return starts


def _free_starts(values: np.ndarray, num_parts: int) -> list[_Slots]:
    """Return starts without equal counts; the greedy one gives each item, in descending order, to the lightest part."""
    num_items = len(values) - 1
    order = np.argsort(-values[:-1]).tolist()
    cost_of, parts = values.tolist(), [[] for _ in range(num_parts)]
    lightest = [(0.0, part) for part in range(num_parts)]
    for item in order:
        cost, part = lightest[0]
        parts[part].append(item)
        heapq.heapreplace(lightest, (cost + cost_of[item], part))
    starts = [_as_slots(parts, num_items)]
    if num_items <= DIFFERENCING_LIMIT:
        alone = np.full((num_items, num_parts, 1), num_items)
        alone[:, 0, 0] = order
        starts.append(_differencing(values, list(alone)))
    return starts


def _as_slots(parts: list[list[int]], empty: int) -> _Slots:
    """Convert lists of items to slots, with at least one empty slot in each part for an item to move to."""
    slots = np.full((len(parts), max(map(len, parts)) + 1), empty)
    for row, part in zip(slots, parts, strict=True):
        row[: len(part)] = part
    return slots


def _greedy(values: np.ndarray, blocks: np.ndarray) -> _Slots:
    """Assign the items of each block, the costliest to the lightest part; alternate the direction in later blocks."""
    sums, slots = np.zeros(blocks.shape[1]), blocks.copy()
    slots[1::2] = blocks[1::2, ::-1]
    for row, block, costs in zip(slots[:GREEDY_BLOCKS], blocks, values[blocks[:GREEDY_BLOCKS]], strict=False):
        place = sums.argsort()
        row[place] = block
        sums[place] += costs
    return np.ascontiguousarray(slots.T)


def _differencing(values: np.ndarray, states: list[np.ndarray]) -> _Slots:
    """Merge the two partial partitions (parts, slots) whose parts differ most, heavy parts with light ones."""
    heap = []
    for number, slots in enumerate(states):
        sums = values[slots].sum(1)
        heap.append((float(sums.min() - sums.max()), number, slots, sums))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, slots, sums = heapq.heappop(heap)
        _, _, others, other_sums = heapq.heappop(heap)
        heavy, light = (-sums).argsort(kind="stable"), other_sums.argsort(kind="stable")
        merged, sums = np.concatenate([slots[heavy], others[light]], axis=1), sums[heavy] + other_sums[light]
        heapq.heappush(heap, (float(sums.min() - sums.max()), number, merged, sums))
        number += 1
    slots = heap[0][2]
    return _as_slots([[i for i in part if i < len(values) - 1] for part in slots.tolist()], len(values) - 1)


def _swap(values: np.ndarray, slots: _Slots, fixed: np.ndarray, tolerance: float) -> _Slots:
    """Swap one item of each heavy part with one of a light part, the heaviest with the lightest, round by round.

    `fixed`, (parts,), is the cost of each part's other items. `slots` are changed in place.
    """
    num_parts, num_slots = slots.shape
    costs = values[slots]
    sums = costs.sum(1) + fixed
    mean = sums.mean()
    stride, one_by_one = 8 if num_slots >= 64 else 1, False  # stride over a heavy part's items in a round
    for number in range(MAX_ROUNDS):
        excess = sums.max() - mean
        if excess <= tolerance * mean or not num_slots:
            break
        by_sum = sums.argsort()
        light = by_sum[:-1] if one_by_one else by_sum[: num_parts // 2]
        heavy = np.full(len(light), by_sum[-1]) if one_by_one else by_sum[::-1][: num_parts // 2]
        gap = sums[heavy] - sums[light]
        light, heavy, gap = light[gap > excess / 4], heavy[gap > excess / 4], gap[gap > excess / 4]
        tried = np.arange(number % stride, num_slots, stride)
        given, taken = _best_swaps(costs, heavy, light, gap, tried)
        moved = costs[heavy, given] - costs[light, taken]
        helps = (moved > 0) & (moved < gap)
        if not helps.any():
            if one_by_one:
                break
            one_by_one, stride = stride == 1, 1  # then try all items, then the heaviest part with every other one
            continue
        if one_by_one:
            helps = np.maximum(sums[heavy] - moved, sums[light] + moved).argmin(keepdims=True)
        heavy, light, given, taken, moved = (x[helps] for x in (heavy, light, given, taken, moved))
        for x in (slots, costs):
            x[heavy, given], x[light, taken] = x[light, taken], x[heavy, given]
        sums[heavy] -= moved
        sums[light] += moved
    return slots


def _best_swaps(
    costs: np.ndarray, heavy: np.ndarray, light: np.ndarray, gap: np.ndarray, tried: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each pair of parts, the two slots whose swap moves closest to half the gap: (pairs,) each."""
    pairs, num_slots = np.arange(len(gap))[:, None], costs.shape[1]
    order = costs[light].argsort(1)
    ascending = np.take_along_axis(costs[light], order, 1)
    wanted = costs[heavy][:, tried] - gap[:, None] / 2
    # One search for all pairs: the values of each pair are shifted to a separate range.
    top = ascending.max() + 1
    found = np.searchsorted((ascending + pairs * top).ravel(), (wanted.clip(0, top) + pairs * top).ravel())
    above = (found.reshape(wanted.shape) - pairs * num_slots).clip(0, num_slots - 1)
    below = (above - 1).clip(0)
    to_above, to_below = (np.abs(np.take_along_axis(ascending, x, 1) - wanted) for x in (above, below))
    nearest = np.where(to_below <= to_above, below, above)
    best = np.minimum(to_below, to_above).argmin(1)
    return tried[best], order[pairs[:, 0], nearest[pairs[:, 0], best]]
