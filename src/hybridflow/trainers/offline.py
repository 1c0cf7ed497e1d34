"""The trainer of offline training: one optimizer step of an objective for each batch."""

from typing import Any

from hybridflow.config import Config
from hybridflow.controller import Backend, WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.data.loader import Dataset
from hybridflow.observability import timed
from hybridflow.trainers.groups import BackendOwner
from hybridflow.trainers.objectives import Objective
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.run_log import Sample
from hybridflow.trainers.speed import Lengths, Speedometer
from hybridflow.trainers.stages import read
from hybridflow.trainers.training_loop import fit
from hybridflow.trainers.training_state import TrainingSaver, restore_training


class OfflineTrainer(BackendOwner):
    """A trainer of the worker group `learner` by `objective`.

    Build it with `build_sft_trainer`, `build_dpo_trainer` or `build_reward_model_trainer`.
    """

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
    ) -> None:
        self.backend = backend
        self.config, self.loader, self.total_steps, self.run = config, loader, total_steps, run
        self.metrics: dict[str, Any] = {}
        self.objective, self.figures = objective, objective.figures
        self.validation, self.speedometer = validation, speedometer
        self.global_step = 0
        self.saver = TrainingSaver(run, [learner], loader, in_background=config.trainer.save_in_background)
        if run.checkpoint:
            self.global_step = restore_training(run.checkpoint, [learner], loader)["global_step"]

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last step, or to step `stop_after`; see `training_loop.fit`."""
        fit(self, stop_after)

    def train_step(self) -> list[Sample]:
        """Make one optimizer step on the next batch and fill `metrics`; return no samples."""
        self.metrics.clear()
        self.metrics["training/epoch"] = self.loader.epoch
        with timed("step", self.metrics):
            batch, metrics = self.objective.step(self.loader.next_batch())
            self.metrics |= metrics
        self.global_step += 1
        self.metrics |= self.trace_metrics()
        masks = read(batch, ["response_mask", "attention_mask"]).batch
        response_lens = masks["response_mask"].sum(-1)
        prompt_lens = masks["attention_mask"].sum(-1) - response_lens
        self.metrics |= self.speedometer.read(self.metrics, Lengths(prompt_lens.tolist(), response_lens.tolist()))
        return []

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
        self.saver.save(self.global_step)

    def finish_save(self) -> None:
        """Wait until a background save is complete."""
        self.saver.finish()
