"""`Trainer`: a trainer of a run, for what goes on around its steps: the loop, recovery, and watches."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config
from hybridflow.controller import Role, WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.trainers.build.groups import BackendOwner
from hybridflow.trainers.run.run_directory import RunDirectory
from hybridflow.trainers.run.samples import Samples
from hybridflow.trainers.run.speed import Speedometer
from hybridflow.trainers.run.training_state import TrainingSaver


class Trainer(BackendOwner):
    """A trainer. `metrics` are those of the current step; `recovery` and `rank_speeds` may be None.

    `figures` are those on the console: label -> metric. `stateful_groups` have the state that checkpoints hold.
    """

    config: Config
    groups: Mapping[Role, WorkerGroup]
    stateful_groups: Sequence[WorkerGroup]
    loader: BatchLoader
    run: RunDirectory
    total_steps: int
    global_step: int
    metrics: dict[str, Any]
    figures: Mapping[str, str]
    speedometer: Speedometer
    saver: TrainingSaver
    recovery: Any = None
    rank_speeds: Any

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
