"""The trainer of offline training: one optimizer step of an objective for each batch."""

from typing import Any

from hybridflow.checkpoint import Checkpoint
from hybridflow.controller import Role
from hybridflow.runtime.observe import timed
from hybridflow.trainers.offline.objectives import Objective
from hybridflow.trainers.read_columns import Lengths, read
from hybridflow.trainers.run.rank_speeds import part_metrics
from hybridflow.trainers.run.run_trainer import RunParts, RunTrainer
from hybridflow.trainers.run.samples import NO_SAMPLES, Samples
from hybridflow.trainers.run.training_state import restore_training


class OfflineTrainer(RunTrainer):
    """A trainer of the actor group by `objective`.

    Build it with `build_sft_trainer`, `build_dpo_trainer` or `build_reward_model_trainer`.
    """

    def __init__(self, parts: RunParts[Any], objective: Objective) -> None:
        self.metrics: dict[str, Any] = {}
        self.objective, self.figures = objective, objective.figures
        self.validation, self.global_step, self.metrics = parts.validation, 0, {}
        super().__init__(parts, [parts.groups[Role.Actor]])

    def restore(self, checkpoint: Checkpoint, *, verify: bool = False) -> None:
        """Continue from a checkpoint or a snapshot; with `verify`, compare the state of the workers with it."""
        state = restore_training(checkpoint, self.stateful_groups, self.loader, verify=verify)
        self.global_step = state["global_step"]

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
