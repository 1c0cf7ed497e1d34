"""What to do about a failure, as two tables, and how often.

The class of a failure is that of the type of its error; each class has an action.
"""

import random
from collections.abc import Callable
from enum import Enum

from hybridflow import errors


class Fault(Enum):
    """A class of failures."""

    CLUSTER = "a service of the cluster died"
    INFRASTRUCTURE = "a worker died, hung or cannot be reached, or a value in a store was lost"
    TRANSFER = "weights changed on their way to a rollout engine"
    MEMORY = "a step ran out of memory"
    NUMERIC = "a loss or a gradient is not finite"
    USER_CODE = "a reward function or another function of the user failed"
    DATA = "a data file, a row or a prompt is malformed"
    STORAGE = "a checkpoint was not written"
    OTHER = "any other error"


class Action(Enum):
    """An answer to a failure."""

    STOP = "stop; the error says what to change, and the same command goes on from the last checkpoint"
    RESTART = "start the group's processes anew, go back to the last snapshot, repeat the step"
    SMALLER = "the same with half the tokens in a micro-batch"


FAULTS: dict[type[errors.HybridFlowError], Fault] = {
    errors.LostClusterError: Fault.CLUSTER,
    errors.LostWorkerError: Fault.INFRASTRUCTURE,
    errors.WeightSyncError: Fault.TRANSFER,
    errors.OutOfMemoryError: Fault.MEMORY,
    errors.WorkerMemoryError: Fault.MEMORY,
    errors.NonFiniteError: Fault.NUMERIC,
    errors.RewardError: Fault.USER_CODE,
    errors.DataError: Fault.DATA,
    errors.CheckpointError: Fault.STORAGE,
    errors.HybridFlowError: Fault.OTHER,
}
"""The class of a failure by the class of its error; the most derived one counts."""

ACTIONS: dict[Fault, Action] = {
    **dict.fromkeys(Fault, Action.STOP),
    Fault.INFRASTRUCTURE: Action.RESTART,
    Fault.TRANSFER: Action.RESTART,
    Fault.MEMORY: Action.SMALLER,
}
"""The action for each class of failures. A failure that would come back with the repeated step stops the run."""


def fault_of(error: errors.HybridFlowError) -> Fault:
    """Return the class of a failure."""
    return next(FAULTS[cls] for cls in type(error).__mro__ if cls in FAULTS)


def action_for(error: errors.HybridFlowError) -> Action:
    """Return the action for a failure; an error of the configuration always stops the run."""
    return Action.STOP if isinstance(error, errors.ConfigError) else ACTIONS[fault_of(error)]


_draw = random.SystemRandom().random  # decides only when to go on

LONGEST_PAUSE_S = 600.0
"""Seconds at which the pause stops to double."""

JITTER = 0.25
"""Pauses vary by this share, so that runs that failed together do not return together."""


class Tries:
    """The failures since the last completed step, and the pause before each further try.

    `pause_s`: before the second try; it doubles with each further one. `draw()` returns a number from 0 to 1.
    """

    def __init__(self, most: int, pause_s: float, draw: Callable[[], float] = _draw) -> None:
        self._most, self._pause_s, self._draw = most, pause_s, draw
        self._furthest = -1
        self.count = 0

    def note_step(self, step: int) -> None:
        """Count from 0 again if the run has come further than at any earlier failure."""
        if step > self._furthest:
            self.count = 0

    def is_exhausted(self) -> bool:
        """Return whether there is no try left."""
        return self.count >= self._most

    def next_pause_s(self, step: int) -> float:
        """Count a failure at `step`; return the seconds to wait before the next try."""
        self._furthest = max(self._furthest, step)
        self.count += 1
        if self.count == 1:
            return 0.0
        doubled_s = self._pause_s * 2.0 ** min(self.count - 2, 100)
        return min(doubled_s, max(LONGEST_PAUSE_S, self._pause_s)) * (1 + JITTER * (2 * self._draw() - 1))
