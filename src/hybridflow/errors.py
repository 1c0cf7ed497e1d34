"""The exception tree. Every error hybridflow raises on purpose is a `HybridFlowError`.

A message names the value, what is valid and the fix. All of them survive pickling, so that an
error of a worker reaches the controller unchanged. `hybridflow.cli.exit_codes` has the exit status of each: what the
configuration causes is a `ConfigError` too, so `DataConfigError` is one that `except DataError` also catches.
"""


class HybridFlowError(Exception):
    """Base of every error raised on purpose; the command line prints it without a traceback."""


class ConfigError(HybridFlowError):
    """A recipe or an override is wrong: unknown key, wrong type, values that contradict each other."""


class DataError(HybridFlowError):
    """A data file, a row of it, a tokenizer or a prompt is malformed or too long."""


class DataConfigError(ConfigError, DataError):
    """A data file that is named does not exist or cannot be written, or a setting does not fit the data."""


class BatchError(HybridFlowError, ValueError):
    """A `DataProto` would become inconsistent, or an operation on it makes no sense."""


class FieldError(HybridFlowError):
    """A column is missing, unexpected, or present twice with different contents."""


class AlgorithmError(HybridFlowError, ValueError):
    """The inputs of an algorithm function have the wrong shape, type or range."""


class AlgorithmConfigError(ConfigError, AlgorithmError):
    """A parameter of an algorithm function is out of range, or names something that does not exist."""


class DispatchError(HybridFlowError):
    """A call on a worker group cannot be split over, or collected from, its ranks."""


class WorkerError(HybridFlowError):
    """A worker failed; carries who it was."""

    def __init__(self, message: str, *, role: str = "", rank: int = -1, node: str = "") -> None:
        super().__init__(message)
        self.role, self.rank, self.node = role, rank, node

    def __reduce__(self):
        return _rebuild_worker_error, (type(self), str(self), self.role, self.rank, self.node)


def _rebuild_worker_error(cls: type[WorkerError], message: str, role: str, rank: int, node: str) -> WorkerError:
    return cls(message, role=role, rank=rank, node=node)


class LostWorkerError(WorkerError):
    """A worker died, is too late or cannot be reached; the same call may succeed with new workers."""


class WorkerDiedError(LostWorkerError):
    """The process of a worker is gone; the message has its exit reason and the last lines of its log."""


class WorkerTimeoutError(LostWorkerError):
    """A call took longer than its deadline; the message says who was waited for, and what they were doing."""


class ModelError(HybridFlowError):
    """A model directory cannot be loaded, or the model lacks something that is needed."""


class ModelConfigError(ConfigError, ModelError):
    """A model directory that is named does not exist, or a setting does not fit the model."""


class RolloutError(HybridFlowError):
    """A generation request is invalid or the rollout engine cannot serve it."""


class RolloutConfigError(ConfigError, RolloutError):
    """A setting of the rollout engine is invalid, or its library is not installed."""


class WeightSyncError(HybridFlowError):
    """Weights did not reach the rollout engine as they are, or it does not compute with them."""


class LostWeightSyncError(LostWorkerError, WeightSyncError):
    """Another process of a weight sync died, is too late or cannot be reached."""


class RewardError(HybridFlowError):
    """A reward function failed or returned something that is not a score."""


class RewardConfigError(ConfigError, RewardError):
    """A reward function cannot be loaded, or does not take the arguments it is called with."""


class NonFiniteError(HybridFlowError):
    """A loss or a gradient is NaN or infinite; the step was refused and nothing was applied."""


class CheckpointError(HybridFlowError):
    """A checkpoint is damaged, does not fit, is of another format version or was not written."""


class CheckpointConfigError(ConfigError, CheckpointError):
    """A checkpoint that is named does not exist or is of another run, or a directory is taken or cannot be written."""


class RunInUseError(CheckpointError):
    """Another process is running in the directory of the run, or has just trained on there."""
