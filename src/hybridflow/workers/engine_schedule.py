"""When batches began and weights were loaded while an engine generated, counted in its steps: recorded, or replayed."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from hybridflow.errors import DataConfigError, RolloutConfigError
from hybridflow.runtime.observe import read_jsonl

SCHEDULE = "schedule.jsonl"
"""The file of a run directory with one row for each event of each engine."""


class EngineSchedule:
    """The events of one engine, in order.

    `engine_steps` of an event counts the steps since the event before; None: all sequences had finished. With `replay`,
    the rows of another run, an event first steps the engine until then.
    """

    def __init__(
        self,
        rank: int,
        step: Callable[[], None],
        has_unfinished: Callable[[], bool],
        replay: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self._rank, self._step, self._has_unfinished = rank, step, has_unfinished
        self._replayed = None if replay is None else deque(row for row in replay if row["rank"] == rank)
        self._rows: deque[dict[str, Any]] = deque()
        self.num_steps = 0
        self._last, self._version = 0, -1
        self._loads_again = False

    def resume(self, step: int) -> None:
        """Continue a replay after this step of training, with weights that are loaded again."""
        if self._replayed is not None:
            self._replayed = deque(row for row in self._replayed if row["step"] > step)
            self._loads_again = True

    def note_step(self) -> None:
        """Count a step of the engine."""
        self.num_steps += 1

    def event(self, kind: Literal["begin", "load"], number: int) -> None:
        """Record that the batch of step `number` begins, or that version `number` is loaded.

        Raises RolloutConfigError if the replayed run had another event, or fewer steps
        until its sequences finished.
        """
        if self._replayed is not None and not self._is_reload(kind, number):
            while self._replayed and self._is_repeated(self._replayed[0]):
                self._replayed.popleft()
            self._run_until(kind, number, self._replayed.popleft() if self._replayed else {})
        steps = self.num_steps - self._last if self._has_unfinished() else None
        self._last = self.num_steps
        self._version = number if kind == "load" else self._version
        self._rows.append({"rank": self._rank, "event": kind, "number": number, "engine_steps": steps})

    def take(self) -> list[dict[str, Any]]:
        """Return the rows since the last call; another thread may add one meanwhile."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def _is_reload(self, kind: str, number: int) -> bool:
        """Return whether a resumed replay loads weights that the run had loaded before this step."""
        loads_again, self._loads_again = self._loads_again and kind == "load", False
        following = self._replayed[0] if self._replayed else {}
        return loads_again and (following.get("event"), following.get("number")) != (kind, number)

    def _is_repeated(self, row: dict[str, Any]) -> bool:
        """Return whether the row loads weights that are loaded: in a resumed run, before which all had finished."""
        return row["event"] == "load" and row["number"] == self._version

    def _run_until(self, kind: str, number: int, row: dict[str, Any]) -> None:
        if (row.get("event"), row.get("number")) != (kind, number):
            found = f"{row['event']} {row['number']}" if row else "no event"
            raise _does_not_fit(self._rank, f"{found} in place of {kind} {number}")
        wanted = row["engine_steps"]
        while self._has_unfinished() and (wanted is None or self.num_steps - self._last < wanted):
            self._step()
        steps = self.num_steps - self._last
        if wanted is not None and steps != wanted:
            raise _does_not_fit(self._rank, f"{kind} {number} after {wanted} steps, but here all ended after {steps}")


def read_schedule(run: str) -> list[dict[str, Any]]:
    """Return the rows of a run directory. Raises RolloutConfigError for a row that is not one of a schedule."""
    path, wanted = Path(run) / SCHEDULE, {"step": int, "rank": int, "event": str, "number": int}
    if not path.is_file():
        raise DataConfigError(
            f"{path} not found; a run with rollout.on_new_weights = 'retract' writes it at its first step."
        )
    rows = read_jsonl(path)
    for line, row in enumerate(rows, start=1):
        steps = row.get("engine_steps", "")
        if not all(type(row.get(name)) is kind for name, kind in wanted.items()) or not isinstance(steps, int | None):
            raise RolloutConfigError(
                f"{path}, line {line}: expected step, rank, event, number and engine_steps, got {row}; use the file "
                "that the run wrote."
            )
    return rows


def _does_not_fit(rank: int, found: str) -> RolloutConfigError:
    return RolloutConfigError(
        f"the schedule of rollout.replay does not fit this run: rank {rank} has {found}; use the recipe of that run, "
        "with equal pools, data, trainer.lag, trainer.total_steps, trainer.val_every and trainer.save_every."
    )
