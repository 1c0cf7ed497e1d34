"""The exception tree. Every error that hybridflow raises on purpose is a `HybridFlowError`.

A message states the value, what is valid and the fix. All errors can be pickled, so that a worker's error reaches the
controller unchanged. `hybridflow.cli.exit_codes` maps each class to an exit status. An error caused by the
configuration is also a `ConfigError`: `except DataError` and `except ConfigError` both catch `DataConfigError`.
"""

import re


class HybridFlowError(Exception):
    """Base of every error raised on purpose; the command line prints it without a traceback."""


class ConfigError(HybridFlowError):
    """A recipe or an override is invalid: unknown key, wrong type, contradictory values."""


class DataError(HybridFlowError):
    """A data file, one of its rows, a tokenizer or a prompt is malformed or too long."""


class DataConfigError(ConfigError, DataError):
    """A configured data file does not exist or cannot be written, or a setting does not fit the data."""


class BatchError(HybridFlowError, ValueError):
    """An operation would make a `DataProto` inconsistent, or is not defined for it."""


class FieldError(HybridFlowError):
    """A column is missing, unexpected, or present twice with different contents."""


class AlgorithmError(HybridFlowError, ValueError):
    """The inputs of an algorithm function have the wrong shape, type or range."""


class AlgorithmConfigError(ConfigError, AlgorithmError):
    """A parameter of an algorithm function is out of range, or names a function or column that does not exist."""


class DispatchError(HybridFlowError):
    """A call on a worker group cannot be dispatched to its ranks, or its results cannot be collected."""


class WorkerError(HybridFlowError):
    """A worker failed; `role`, `rank` and `node` say which one."""

    def __init__(self, message: str, *, role: str = "", rank: int = -1, node: str = "") -> None:
        super().__init__(message)
        self.role, self.rank, self.node = role, rank, node

    def __reduce__(self):
        return _rebuild_worker_error, (type(self), str(self), self.role, self.rank, self.node)


def _rebuild_worker_error(cls: type[WorkerError], message: str, role: str, rank: int, node: str) -> WorkerError:
    return cls(message, role=role, rank=rank, node=node)


class LostWorkerError(WorkerError):
    """A worker died, missed its deadline or is unreachable; the same call may succeed with new workers."""


class LostClusterError(LostWorkerError):
    """A service of the Ray cluster has died, and all workers with it; the same command may succeed again."""


class WorkerDiedError(LostWorkerError):
    """The process of a worker exited; the message has its exit reason and the last lines of its log."""


class WorkerMemoryError(WorkerDiedError):
    """A worker was killed because its node had too little memory; with fewer tokens at a time it may have enough."""


class WorkerTimeoutError(LostWorkerError):
    """A call took longer than its deadline; the message names the late workers, with their stacks."""


class ModelError(HybridFlowError):
    """A model directory cannot be loaded, or the model lacks a required part."""


class OutOfMemoryError(ModelError):
    """A forward pass or an update ran out of memory; nothing was applied, and fewer tokens at a time may fit."""


class ModelConfigError(ConfigError, ModelError):
    """A configured model directory does not exist, or a setting does not fit the model."""


class RolloutError(HybridFlowError):
    """A generation request is invalid or the rollout engine cannot serve it."""


class RolloutConfigError(ConfigError, RolloutError):
    """A setting of the rollout engine is invalid, or its library is not installed."""


class WeightSyncError(HybridFlowError):
    """The rollout engine received other weights than were sent, or does not compute with them."""


class LostWeightSyncError(LostWorkerError, WeightSyncError):
    """Another process of a weight sync died, missed its deadline or is unreachable."""


class RewardError(HybridFlowError):
    """A reward function failed or returned a value that is not a score."""


class RewardConfigError(ConfigError, RewardError):
    """A reward function cannot be loaded, or does not accept the arguments of the call."""


class EnvironmentConfigError(ConfigError):
    """An environment cannot be loaded, a tool has no schema, or a chat template cannot serve episodes."""


class ToolError(HybridFlowError):
    """A call of a tool is wrong; the text is an answer for the model."""


class NonFiniteError(HybridFlowError):
    """A loss or a gradient is NaN or infinite; the optimizer step was not applied."""

    @property
    def rows(self) -> list[int]:
        """The rows of the batch, counted from 0, that the message names: their loss or gradient is not finite."""
        return [int(row) for row in re.findall(r"\brow (\d+): loss", str(self))]


class CheckpointError(HybridFlowError):
    """A checkpoint is damaged, does not fit the run, has another format version or was not written."""


class CheckpointConfigError(ConfigError, CheckpointError):
    """A checkpoint does not exist or belongs to another run, or a directory is in use or cannot be written."""


class RunInUseError(CheckpointError):
    """Another process uses the directory of the run, or has just continued the run."""
