"""The shares of the ranks of a group in its calls: measured for some methods, set by the program for others."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.controller.part_sizes import MeasuredParts, SteadyShares
from hybridflow.observability import Trace, TraceEvent, get_logger
from hybridflow.protocol import Handle

logger = get_logger(__name__)

MOST_LOGGED = 8
"""Parts whose shares the log names."""


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
