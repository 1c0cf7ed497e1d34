"""The trainer of offline training: one optimizer step of an objective for each batch."""

from collections.abc import Mapping
from typing import Any

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config
from hybridflow.controller import Backend, Role, WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.data.loader import Dataset
from hybridflow.runtime.observe import performance_report, timed
from hybridflow.trainers.groups import BackendOwner
from hybridflow.trainers.objectives import Objective
from hybridflow.trainers.pool_sizes import PoolSizes
from hybridflow.trainers.rank_speeds import SlowRankWatch, measured_shares, part_metrics, watch_slow_ranks
from hybridflow.trainers.read_columns import Lengths, read
from hybridflow.trainers.recovery import Recovery, build_recovery
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.samples import NO_SAMPLES, Samples
from hybridflow.trainers.speed import Speedometer
from hybridflow.trainers.token_budgets import TokenBudgets
from hybridflow.trainers.training_loop import fit
from hybridflow.trainers.training_state import TrainingSaver, restore_training


class OfflineTrainer(BackendOwner):
    """A trainer of the worker group `learner` by `objective`.

    Build it with `build_sft_trainer`, `build_dpo_trainer` or `build_reward_model_trainer`.
    """

    slow_ranks: SlowRankWatch | None = None

    def __init__(
        self,
        config: Config,
        *,
        objective: Objective,
        learner: WorkerGroup,
        loader: BatchLoader,
        total_steps: int,
        run: RunDirectory,
        speedometer: Speedometer,
        validation: Dataset | None = None,
        backend: Backend | None = None,
        groups: Mapping[Role, WorkerGroup] | None = None,
        token_budgets: TokenBudgets | None = None,
        pool_sizes: PoolSizes | None = None,
    ) -> None:
        """Train `learner`; `groups` (by default it alone), backend and token budgets are those that recovery needs."""
        self.backend = backend
        self.config, self.loader, self.total_steps, self.run = config, loader, total_steps, run
        self.metrics: dict[str, Any] = {}
        self.objective, self.figures = objective, objective.figures
        self.validation, self.speedometer = validation, speedometer
        self.global_step = 0
        self.groups = groups or {Role.Actor: learner}
        self.rank_speeds = measured_shares(config, self.groups)
        self.stateful_groups = [learner]
        self.saver = self.new_saver(run.store, in_background=config.trainer.save_in_background)
        if run.checkpoint:
            self.restore(run.checkpoint)
        self.recovery: Recovery | None = None
        if backend and token_budgets:
            self.recovery = build_recovery(self, self.groups, backend, token_budgets, pool_sizes)
            self.slow_ranks = watch_slow_ranks(self, self.groups, backend)

    def new_saver(self, store: CheckpointStore, *, in_background: bool) -> TrainingSaver:
        """Return a saver of the training state into a store."""
        return TrainingSaver(store, self.run.identity, self.stateful_groups, self.loader, in_background=in_background)

    def restore(self, checkpoint: Checkpoint, *, verify: bool = False) -> None:
        """Continue from a checkpoint or a snapshot; with `verify`, compare the state of the workers with it."""
        state = restore_training(checkpoint, self.stateful_groups, self.loader, verify=verify)
        self.global_step = state["global_step"]

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last step, or to step `stop_after`; see `training_loop.fit`."""
        fit(self, stop_after)

    def train_step(self) -> Samples:
        """Make one optimizer step on the next batch and fill `metrics`; return no samples."""
        self.metrics.clear()
        self.metrics["training/epoch"] = self.loader.epoch
        with timed("step", self.metrics):
            batch, metrics = self.objective.step(self.loader.next_batch())
            self.metrics |= metrics
        self.global_step += 1
        self.metrics |= self.trace_metrics() | part_metrics(self.groups)
        masks = read(batch, ["response_mask", "attention_mask"]).batch
        response_lens = masks["response_mask"].sum(-1)
        prompt_lens = masks["attention_mask"].sum(-1) - response_lens
        self.metrics |= self.speedometer.read(self.metrics, Lengths(prompt_lens.tolist(), response_lens.tolist()))
        return NO_SAMPLES

    def get_performance_report(self) -> dict[str, Any]:
        """Return the transfers of the completed steps, see `performance_report`."""
        return performance_report(self.run.path)

    def validate(self) -> dict[str, float]:
        """Return the objective's metrics over the validation data, without training; empty if there is none."""
        if self.validation is None:
            return {}
        sums: dict[str, float] = {}
        count, batch_size = 0, self.config.validation.batch_size
        with timed("validation", self.metrics):
            for start in range(0, len(self.validation), batch_size):
                rows = range(start, min(start + batch_size, len(self.validation)))
                of_batch, num = self.objective.measure(self.validation.collate(rows))
                sums = {name: sums.get(name, 0.0) + value for name, value in of_batch.items()}
                count += num
        return {name: value / count for name, value in sums.items()}

    def save(self) -> None:
        """Save a checkpoint of the full training state, or begin to save it in the background."""
        self.save_with(self.saver)

    def save_with(self, saver: TrainingSaver) -> None:
        """Save the training state, or begin to."""
        saver.save(self.global_step)

    def finish_save(self) -> None:
        """Wait until a background save is complete."""
        self.saver.finish()
