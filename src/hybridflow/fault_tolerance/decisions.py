"""What to do about a failure: its class by the type of the error, and the action for each class, as two tables."""

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
    Fault.CLUSTER: Action.STOP,
    Fault.INFRASTRUCTURE: Action.RESTART,
    Fault.TRANSFER: Action.RESTART,
    Fault.MEMORY: Action.SMALLER,
    Fault.NUMERIC: Action.STOP,
    Fault.USER_CODE: Action.STOP,
    Fault.DATA: Action.STOP,
    Fault.STORAGE: Action.STOP,
    Fault.OTHER: Action.STOP,
}
"""The action for each class of failures. A failure that would come back with the repeated step stops the run."""


def fault_of(error: errors.HybridFlowError) -> Fault:
    """Return the class of a failure."""
    return next(FAULTS[cls] for cls in type(error).__mro__ if cls in FAULTS)


def action_for(error: errors.HybridFlowError) -> Action:
    """Return the action for a failure; an error of the configuration always stops the run."""
    return Action.STOP if isinstance(error, errors.ConfigError) else ACTIONS[fault_of(error)]
