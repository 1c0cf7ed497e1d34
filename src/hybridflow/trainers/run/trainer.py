"""The interface of the trainer of a run, for what goes on around its steps: the loop, recovery, and watches."""

from collections.abc import Mapping
from typing import Any, Protocol

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config
from hybridflow.controller import Backend, Role, WorkerGroup
from hybridflow.runtime.observe import TraceEvent
from hybridflow.trainers.run.run_directory import RunDirectory
from hybridflow.trainers.run.samples import Samples
from hybridflow.trainers.run.speed import Speedometer
from hybridflow.trainers.run.training_state import TrainingSaver


class Trainer(Protocol):
    """A trainer. `metrics` are those of the current step; `recovery` and `rank_speeds` may be None."""

    config: Config
    groups: Mapping[Role, WorkerGroup]
    backend: Backend | None
    run: RunDirectory
    total_steps: int
    global_step: int
    metrics: dict[str, Any]
    events: list[TraceEvent]
    speedometer: Speedometer
    saver: TrainingSaver
    recovery: Any
    rank_speeds: Any

    @property
    def figures(self) -> Mapping[str, str]:
        """The figures on the console: label -> metric."""
        ...

    def train_step(self) -> Samples:
        """Train on the next batch, count the step and replace `metrics`; return samples to log."""
        ...

    def validate(self) -> dict[str, float]:
        """Return the validation metrics of the current weights; empty without validation data."""
        ...

    def take_events(self) -> list[TraceEvent]:
        """Return the trace events since the last call."""
        ...

    def new_saver(self, store: CheckpointStore, *, in_background: bool) -> TrainingSaver:
        """Return a saver of the training state into a store."""
        ...

    def save_with(self, saver: TrainingSaver) -> None:
        """Save the training state, or begin to."""
        ...

    def save(self) -> None:
        """Save a checkpoint of the full training state, or begin to; `finish_save` completes it."""
        ...

    def finish_save(self) -> None:
        """Wait until a background save is complete."""
        ...

    def restore(self, checkpoint: Checkpoint, *, verify: bool = False) -> None:
        """Continue from a checkpoint or a snapshot; with `verify`, compare the state of the workers with it."""
        ...
