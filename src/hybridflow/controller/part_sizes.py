"""Sizes of the parts of a batch by speed: the part of a slow rank has fewer rows.

    seconds per row of each part ── mean of the newest ── worth a change? ── shares ── sizes of the next call

Times are noisy, so shares change only if that saves time beyond the noise, by a bounded factor at once, and a change
that did not help is taken back. A method that computes without collectives is measured by the durations of its calls;
for others the program measures the ranks (`trainers/run/rank_speeds.py`).
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from hybridflow.controller.columns import columns_of
from hybridflow.errors import DispatchError, FieldError
from hybridflow.protocol import DataProto, DataProtoFuture, Handle
from hybridflow.protocol.handle import Duration
from hybridflow.runtime.observe import Trace, TraceEvent, get_logger

logger = get_logger(__name__)

PartsOf = Literal["equal", "measured", "shares"]
PARTS = ("equal", "measured", "shares")

BALANCED_PART_SIZES = "part_sizes"
"""Key of `meta_info`: rows of each part by name of the group. `trainers/balance.py` sets it, a call reads it."""

FEWEST, MOST = 3, 8
"""Number of measurements that a change needs, and of newest measurements that count."""

LEAST_GAIN = 0.05
"""Share of the time that a change must save. Changes for less would cost more than they save."""

NOISE = 3.0
"""Standard errors of the measured speeds that a gain must exceed."""

LARGEST_CHANGE = 2.0
"""Factor by which a share may become larger or smaller at once."""

WORTH = 0.25
"""Share of the expected gain that must be reached, otherwise the change is taken back."""

PAUSE = 50
"""Number of measurements after a change that was taken back until the next change."""

MAX_WAITING = 16
"""Number of unfinished calls that are kept; the oldest beyond it are not measured."""

MOST_LOGGED = 8
"""Parts whose shares the log names."""


def even_sizes(num_units: int, num_parts: int) -> list[int]:
    """Return sizes that differ by at most one, the larger ones first."""
    size, larger = divmod(num_units, num_parts)
    return [size + (part < larger) for part in range(num_parts)]


def sizes_of_shares(shares: Sequence[float], num_units: int) -> list[int]:
    """Return the units of each part, at least one, proportional to its share. Needs a unit for each part."""
    quotas = [num_units * share / sum(shares) for share in shares]
    sizes = [max(1, int(quota)) for quota in quotas]
    while (missing := num_units - sum(sizes)) != 0:
        step = 1 if missing > 0 else -1
        candidates = [part for part in range(len(shares)) if sizes[part] + step >= 1]
        chosen = max(candidates, key=lambda part: (step * (quotas[part] - sizes[part]), -part))
        sizes[chosen] += step
    return sizes


class Parts(list[Any]):
    """A batch that is already split, one element for each part."""


class SteadyShares:
    """The shares of a batch by which its parts would take equally long; equal until enough is measured.

    `values`: the share of each part, which sum to 1. `costs`: the measured seconds of a unit of each part, relative to
    the mean of the parts, when the shares last changed; empty before, and after a change that was taken back.
    """

    def __init__(self, num_parts: int) -> None:
        self.values = [1 / num_parts] * num_parts
        self.costs: list[float] = []
        self._newest: deque[list[float]] = deque(maxlen=MOST)
        self._times: deque[float] = deque(maxlen=MOST)
        self._is_first, self._pause = True, 0
        self._before: tuple[list[float], float, float] | None = None  # shares, time and gain expected of the change

    def note(self, seconds: Sequence[float], time: float = 0.0) -> bool:
        """Record the seconds of a unit of each part; return whether the shares changed.

        `time`: how long the slowest part took for each unit of the whole batch; 0: unknown, then no change is taken
        back. The first measurement does not count: it includes what is loaded and compiled at first.
        """
        if self._is_first:
            self._is_first = False
            return False
        mean = fmean(seconds)
        self._newest.append([second / mean for second in seconds])
        self._times.append(time)
        self._pause -= 1
        if len(self._newest) < FEWEST:
            return False
        if self._before is not None and self._has_failed():
            return True
        return self._pause <= 0 and self._change()

    def _has_failed(self) -> bool:
        """Take the last change back if it did not help; return whether it was taken back."""
        assert self._before is not None
        (shares, time_before, gain), self._before = self._before, None
        if not time_before or time_before / fmean(self._times) - 1 >= WORTH * gain:
            return False
        self.values, self.costs, self._pause = shares, [], PAUSE
        self._forget()
        return True

    def _change(self) -> bool:
        """Move the shares towards those of equal times if that is worth it; return whether they changed."""
        columns = list(zip(*self._newest, strict=True))
        costs = [fmean(column) for column in columns]
        pace = sum(1 / cost for cost in costs)
        noise = max(stdev(column) / sqrt(len(column)) / cost for column, cost in zip(columns, costs, strict=True))
        if _time(self.values, costs) * pace - 1 <= max(LEAST_GAIN, NOISE * noise):
            return False
        bounded = [
            min(max(1 / cost / pace, share / LARGEST_CHANGE), share * LARGEST_CHANGE)
            for share, cost in zip(self.values, costs, strict=True)
        ]
        changed = [share / sum(bounded) for share in bounded]
        gain = _time(self.values, costs) / _time(changed, costs) - 1
        self._before = (self.values, fmean(list(self._times)[-FEWEST:]), gain)
        self.values, self.costs = changed, costs
        self._forget()
        return True

    def _forget(self) -> None:
        self._newest.clear()
        self._times.clear()


def _time(shares: Sequence[float], costs: Sequence[float]) -> float:
    """Return the time of the slowest part, relative to a unit of mean cost."""
    return max(share * cost for share, cost in zip(shares, costs, strict=True))


class MeasuredParts:
    """The shares of each part by the durations of the calls of one method.

    Sizes are in units: one row, or one group of rows. No part is empty, so that every rank continues to be measured.
    """

    def __init__(self, num_parts: int) -> None:
        self.shares = SteadyShares(num_parts)
        self._calls: deque[tuple[list[float], list[list[Duration]]]] = deque(maxlen=MAX_WAITING)

    def note(self, sizes: Sequence[float], durations: Sequence[Sequence[Duration]]) -> None:
        """Record a call that has started: the size of each part, and the durations of the ranks of each part."""
        self._calls.append((list(sizes), [list(of_part) for of_part in durations]))

    def update(self) -> bool:
        """Measure the calls that have finished on every rank, in their order; return whether the shares changed."""
        calls, self._calls = self._calls, deque(maxlen=MAX_WAITING)
        has_changed = False
        for sizes, durations in calls:
            seconds = [[duration.seconds for duration in of_part] for of_part in durations]
            if any(second is None for of_part in seconds for second in of_part):
                self._calls.append((sizes, durations))
                continue
            slowest = [max(second or 0.0 for second in of_part) for of_part in seconds]
            if min(slowest) <= 0.0:
                continue  # too short to be measured
            of_units = [second / size for size, second in zip(sizes, slowest, strict=True)]
            has_changed |= self.shares.note(of_units, max(slowest) / sum(sizes))
        return has_changed


class GroupShares:
    """The shares of each method of a group named `name`, by the `parts` of its registration.

    `of_ranks`: the shares of methods with parts="shares", which the program sets; None: equal parts.
    """

    def __init__(self, name: str, parts: Mapping[str, Any], trace: Trace) -> None:
        self._name, self._parts, self._trace = name, parts, trace
        self._measured: dict[str, MeasuredParts] = {}
        self._of_ranks_used: set[str] = set()
        self.of_ranks: SteadyShares | None = None

    def of(self, method_name: str, num_parts: int) -> SteadyShares | None:
        """Return the shares of the parts of the next call of a method; None if they are equal."""
        if self._parts[method_name] == "measured":
            measured = self._measured.setdefault(method_name, MeasuredParts(num_parts))
            if measured.update():
                self.record(method_name, measured.shares)
            return measured.shares
        shares = self.of_ranks if self._parts[method_name] == "shares" else None
        return shares if shares is not None and len(shares.values) == num_parts else None

    def note_call(
        self, method_name: str, sizes: Sequence[int], part_of_rank: Sequence[int], handles: Sequence[Handle]
    ) -> None:
        """Record a call that has started, to measure how long it takes on each rank if its parts are measured."""
        if self._parts[method_name] == "shares":
            self._of_ranks_used.add(method_name)
        if self._parts[method_name] != "measured":
            return
        durations: list[list[Any]] = [[] for _ in sizes]
        for part, handle in zip(part_of_rank, handles, strict=True):
            durations[part].append(handle.duration)
        self._measured.setdefault(method_name, MeasuredParts(len(sizes))).note(sizes, durations)

    def least(self) -> dict[str, float]:
        """Return the smallest share of a part relative to an equal one, of each method with shares that was called."""
        shares = {name: measured.shares for name, measured in self._measured.items()}
        if self.of_ranks is not None:
            shares |= dict.fromkeys(sorted(self._of_ranks_used), self.of_ranks)
        return {name: min(of.values) * len(of.values) for name, of in shares.items()}

    def record(self, what: str, shares: SteadyShares) -> None:
        """Record in the log and the trace that shares have changed, and why."""
        now = time.time()
        for part, share in enumerate(shares.values):
            reason = "since the last change did not help"
            if shares.costs:
                reason = f"since a row takes {shares.costs[part]:.2f} times the mean of the parts"
            note = f"{share:.1%} of the rows, {reason}"
            self._trace.record(TraceEvent("parts", what, f"{self._name}/{part}", "", now, now, note=note))
        most = ", ".join(f"{share:.1%}" for share in shares.values[:MOST_LOGGED])
        more = f" and {len(shares.values) - MOST_LOGGED} more" if len(shares.values) > MOST_LOGGED else ""
        logger.info("rows of each part of %s for %s from now on: %s%s", self._name, what, most, more)


def response_group_size(batches: Sequence[DataProto | DataProtoFuture], column: str, where: str) -> int:
    """Return the number of rows of each response group: adjacent rows with equal values of `column`.

    If the batch is a future, this column is read. Raises FieldError if no batch has the column, and DispatchError if
    the rows of a group are not adjacent or groups differ in size: equal parts could not keep them together.
    """
    holder = next((batch for batch in batches if column in columns_of(batch)), None)
    if holder is None:
        raise FieldError(
            f"{where} keeps groups of {column!r} on one rank, but no batch of the call has column {column!r}; add it."
        )
    data = DataProtoFuture.of(holder).get(column)
    values = data.non_tensor_batch[column] if column in data.non_tensor_batch else data.batch[column].numpy()
    starts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    sizes = np.diff(np.concatenate([starts, [len(values)]]))
    if len(set(values[starts].tolist())) < len(starts) or len(set(sizes.tolist())) > 1:
        raise DispatchError(
            f"{where} keeps groups of {column!r} on one rank, which requires groups of equal size with adjacent rows; "
            f"got {len(starts)} runs of {sorted(set(sizes.tolist()))} rows for {len(set(values.tolist()))} values. "
            f"Sort the batch by {column!r} (reorder), or give every group the same number of rows."
        )
    return int(sizes[0])
