"""The supervised loop: batches of examples in, one optimizer step each."""

from typing import Any

from hybridflow.config import Config
from hybridflow.controller import Backend, WorkerGroup
from hybridflow.data import BatchLoader, SFTDataset
from hybridflow.observability import SFT_FIGURES, reduce_lists, timed
from hybridflow.protocol import DataProto
from hybridflow.trainers.groups import BackendOwner
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.run_log import Sample
from hybridflow.trainers.speed import Lengths, Speedometer
from hybridflow.trainers.stage_calls import StageCalls
from hybridflow.trainers.stages import with_row_ids
from hybridflow.trainers.training_loop import fit
from hybridflow.trainers.training_state import TrainingSaver, restore_training


class SFTTrainer(BackendOwner):
    """Trains a policy to imitate. Build it by `build_sft_trainer`."""

    def __init__(
        self,
        config: Config,
        *,
        policy: WorkerGroup,
        loader: BatchLoader,
        total_steps: int,
        run: RunDirectory,
        speedometer: Speedometer,
        validation: SFTDataset | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend
        self.config, self.loader, self.total_steps, self.run = config, loader, total_steps, run
        self.metrics: dict[str, Any] = {}
        self.figures = SFT_FIGURES
        self.group, self.policy = policy, StageCalls(policy)
        self.validation, self.speedometer = validation, speedometer
        self.global_step = 0
        self.saver = TrainingSaver(run, [policy], loader, in_background=config.trainer.save_in_background)
        if run.checkpoint:
            self.global_step = restore_training(run.checkpoint, [policy], loader)["global_step"]

    def step(self, examples: DataProto) -> DataProto:
        """One optimizer step on a batch of examples; returns the batch with its row ids."""
        batch = with_row_ids(examples)
        batch.meta_info["mini_batches"] = [batch.batch["row_ids"].tolist()]
        self.metrics |= reduce_lists(self.policy.update_sft(batch).get(()).meta_info["metrics"])
        return batch

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last step, or to step `stop_after`; a signal ends it as well. See `fit`."""
        fit(self, stop_after)

    def train_step(self) -> list[Sample]:
        """The next batch through `step`; fills `metrics`. There are no samples to show."""
        self.metrics.clear()
        self.metrics["training/epoch"] = self.loader.epoch
        with timed("step", self.metrics):
            batch = self.step(self.loader.next_batch())
        self.global_step += 1
        self.metrics |= self.trace_metrics()
        response_lens = batch.batch["response_mask"].sum(-1)
        prompt_lens = batch.batch["attention_mask"].sum(-1) - response_lens
        self.metrics |= self.speedometer.read(self.metrics, Lengths(prompt_lens.tolist(), response_lens.tolist()))
        return []

    def validate(self) -> dict[str, float]:
        """Cross-entropy for each response token of the validation examples; empty without any."""
        if self.validation is None:
            return {}
        total, count, batch_size = 0.0, 0, self.config.validation.batch_size
        with timed("validation", self.metrics):
            for start in range(0, len(self.validation), batch_size):
                batch = self.validation.collate(range(start, min(start + batch_size, len(self.validation))))
                mask = batch.batch["response_mask"]
                log_probs = self.group.compute_log_probs(batch).batch["old_log_probs"][mask]
                total, count = total - float(log_probs.double().sum()), count + len(log_probs)
        return {"sft/val_loss": total / count}

    def save(self) -> None:
        """Write a checkpoint of everything that reaches a number, or begin to."""
        self.saver.save(self.global_step)

    def finish_save(self) -> None:
        """Wait until the save that was begun is a checkpoint."""
        self.saver.finish()
