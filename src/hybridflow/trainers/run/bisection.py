"""The two searches of `hybridflow bisect`, which know neither runs nor models."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def first_lost(is_lost: Callable[[int], bool], points: Sequence[int]) -> tuple[int, int]:
    """Return two neighbours of `points`, of which the first is not lost and the second is.

    The first and the last of `points` are known to be so, and are not evaluated. log2(n) evaluations.
    """
    low, high = 0, len(points) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if is_lost(points[middle]):
            high = middle
        else:
            low = middle
    return points[low], points[high]


def smallest_removal(keeps: Callable[[Sequence[T]], bool], items: Sequence[T], most: int) -> tuple[list[T], bool]:
    """Return a part of `items` whose removal keeps the metric, and whether it was seen that it needs each item of it.

    The removal of all of `items` is known to keep it. At most `most` evaluations. Delta debugging: Zeller and
    Hildebrandt, 2002, https://doi.org/10.1109/32.988498.
    """
    removed, num_parts, known = list(items), 2, set[tuple[T, ...]]()

    def is_enough(some: list[T]) -> bool:
        nonlocal most
        if not some or tuple(some) in known or most == 0:
            return False
        most -= 1
        known.add(tuple(some))
        return keeps(some)

    while len(removed) > 1 and most:
        bounds = [len(removed) * i // num_parts for i in range(num_parts + 1)]
        parts = [removed[begin:end] for begin, end in pairwise(bounds)]
        rests = [removed[:begin] + removed[end:] for begin, end in pairwise(bounds)]
        if part := next(filter(is_enough, parts), None):
            removed, num_parts = part, 2
        elif rest := next(filter(is_enough, rests), None):
            removed, num_parts = rest, max(num_parts - 1, 2)
        elif num_parts == len(removed):
            return removed, most > 0
        else:
            num_parts = min(2 * num_parts, len(removed))
    return removed, len(removed) == 1
