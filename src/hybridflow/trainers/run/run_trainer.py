"""`RunTrainer`, the base class of trainers: data, run directory, checkpoints and recovery around `train_step`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hybridflow.config import Config
from hybridflow.controller import Backend, Role, WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.data.loader import Dataset
from hybridflow.runtime.observe import performance_report
from hybridflow.trainers.build.pool_sizes import PoolSizes
from hybridflow.trainers.build.token_budgets import TokenBudgets
from hybridflow.trainers.run.rank_speeds import measured_shares
from hybridflow.trainers.run.recovery.recovery import build_recovery
from hybridflow.trainers.run.run_directory import RunDirectory
from hybridflow.trainers.run.speed import Speedometer
from hybridflow.trainers.run.trainer import Trainer
from hybridflow.trainers.run.training_loop import fit

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


class RunTrainer(Trainer):
    """A trainer that is built from the parts of a run.

    A subclass sets what `restore` needs before it calls this constructor, which continues from the run's checkpoint.
    """

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
            self.recovery = build_recovery(self, parts.token_budgets, parts.pool_sizes)

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last step, or to step `stop_after`; see `training_loop.fit`."""
        fit(self, stop_after)

    def close(self) -> None:
        """Stop the workers, and the Ray cluster if the run started it; remove the snapshots."""
        super().close()
        if self.recovery is not None:
            self.recovery.snapshots.close()

    def get_performance_report(self) -> dict[str, Any]:
        """Return the transfers of the completed steps, see `performance_report`."""
        return performance_report(self.run.path)
