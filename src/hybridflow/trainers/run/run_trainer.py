"""`RunTrainer`, the base class of trainers: data, run directory, checkpoints and recovery around `train_step`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config
from hybridflow.controller import Backend, Role, WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.data.loader import Dataset
from hybridflow.runtime.observe import performance_report
from hybridflow.trainers.build.groups import BackendOwner
from hybridflow.trainers.build.pool_sizes import PoolSizes
from hybridflow.trainers.build.token_budgets import TokenBudgets
from hybridflow.trainers.run.rank_speeds import measured_shares
from hybridflow.trainers.run.recovery.recovery import Recovery, build_recovery
from hybridflow.trainers.run.run_directory import RunDirectory
from hybridflow.trainers.run.samples import Samples
from hybridflow.trainers.run.speed import Speedometer
from hybridflow.trainers.run.training_loop import fit
from hybridflow.trainers.run.training_state import TrainingSaver

D = TypeVar("D", bound=Dataset)


@dataclass(frozen=True)
class RunParts(Generic[D]):
    """The parts from which a trainer is built."""

    config: Config
    """With the pools that fit the cluster, if their sizes may change."""
    groups: Mapping[Role, WorkerGroup]
    loader: BatchLoader
    validation: D | None
    total_steps: int
    run: RunDirectory
    speedometer: Speedometer
    backend: Backend
    token_budgets: TokenBudgets | None = None
    """None: the run does not recover from failures."""
    pool_sizes: PoolSizes | None = None


class RunTrainer(BackendOwner):
    """A trainer of a run. `stateful_groups` have the state that checkpoints hold.

    A subclass sets what `restore` needs before it calls this constructor, which continues from the run's checkpoint.
    """

    figures: Mapping[str, str]
    global_step: int
    total_steps: int
    metrics: dict[str, Any]
    recovery: Recovery | None = None

    def __init__(self, parts: RunParts[Any], stateful_groups: Sequence[WorkerGroup]) -> None:
        self.config, self.groups = parts.config, parts.groups
        self.backend: Backend | None = parts.backend
        self.loader, self.total_steps, self.run = parts.loader, parts.total_steps, parts.run
        self.speedometer, self.stateful_groups = parts.speedometer, stateful_groups
        self.rank_speeds = measured_shares(self.config, self.groups)
        self.saver = self.new_saver(self.run.store, in_background=self.config.trainer.save_in_background)
        self.saver.num_kept = self.config.trainer.keep_checkpoints
        if self.run.checkpoint:
            self.restore(self.run.checkpoint)
        if parts.token_budgets:
            self.recovery = build_recovery(self, parts.groups, parts.backend, parts.token_budgets, parts.pool_sizes)

    def train_step(self) -> Samples:
        """Train on the next batch, count the step and replace `metrics`; return samples to log."""
        raise NotImplementedError

    def validate(self) -> dict[str, float]:
        """Return the validation metrics of the current weights; empty without validation data."""
        raise NotImplementedError

    def restore(self, checkpoint: Checkpoint, *, verify: bool = False) -> None:
        """Continue from a checkpoint or a snapshot; with `verify`, compare the state of the workers with it."""
        raise NotImplementedError

    def save_with(self, saver: TrainingSaver) -> None:
        """Save the training state, or begin to."""
        saver.save(self.global_step)

    def save(self) -> None:
        """Save a checkpoint of the full training state, or begin to save it in the background."""
        self.save_with(self.saver)

    def finish_save(self) -> None:
        """Wait until a background save is complete."""
        self.saver.finish()

    def new_saver(self, store: CheckpointStore, *, in_background: bool) -> TrainingSaver:
        """Return a saver of the training state into a store."""
        return TrainingSaver(store, self.run.identity, self.stateful_groups, self.loader, in_background=in_background)

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last step, or to step `stop_after`; see `training_loop.fit`."""
        fit(self, stop_after)

    def close(self) -> None:
        """Stop the workers, and the Ray cluster if the run started it; remove the snapshots."""
        super().close()
        if self.recovery is not None:
            self.recovery.close()

    def get_performance_report(self) -> dict[str, Any]:
        """Return the transfers of the completed steps, see `performance_report`."""
        return performance_report(self.run.path)
