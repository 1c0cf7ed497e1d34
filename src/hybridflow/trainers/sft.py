"""The supervised loop: batches of examples in, one optimizer step each."""

from typing import Any

from hybridflow.checkpoint import Checkpoint, save_state
from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.data import BatchLoader, SFTDataset
from hybridflow.observability import SFT_FIGURES, get_logger, reduce_lists, timed
from hybridflow.protocol import DataProto
from hybridflow.runtime import StopRequest, capture_random_state, restore_random_state
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.stages import with_row_ids
from hybridflow.trainers.timed_group import TimedGroup

logger = get_logger(__name__)

VALIDATION_BATCH_SIZE = 512


class SFTTrainer:
    """Trains a policy to imitate. Build it by `build_sft_trainer`."""

    def __init__(
        self,
        config: Config,
        *,
        policy: WorkerGroup,
        loader: BatchLoader,
        total_steps: int,
        run: RunDirectory,
        validation: SFTDataset | None = None,
    ) -> None:
        self.config, self.group, self.loader, self.total_steps, self.run = config, policy, loader, total_steps, run
        self.metrics: dict[str, Any] = {}
        self.policy = TimedGroup(policy, self.metrics)
        self.validation = validation
        self.global_step = 0
        if run.checkpoint:
            self._resume(run.checkpoint)

    def step(self, examples: DataProto) -> None:
        """One optimizer step on a batch of examples."""
        batch = with_row_ids(examples)
        batch.meta_info["mini_batches"] = [batch.batch["row_ids"].tolist()]
        self.metrics |= reduce_lists(self.policy.update_sft(batch).meta_info["metrics"])
        self.metrics["perf/num_tokens"] = int(batch.batch["attention_mask"].sum())

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last step; `stop_after` and signals as in `PPOTrainer.fit`."""
        trainer = self.config.trainer
        tracker, _ = self.run.trackers(self.total_steps, SFT_FIGURES, self.run.path.name)
        try:
            with StopRequest() as stop:
                while self.global_step < self.total_steps:
                    self.metrics.clear()
                    with timed("step", self.metrics):
                        self.step(self.loader.next_batch())
                    self.global_step += 1
                    finished = self.global_step == self.total_steps
                    self.metrics["training/epoch"] = self.loader.epoch
                    self.metrics["perf/tokens_per_s"] = self.metrics["perf/num_tokens"] / self.metrics["timing_s/step"]
                    if finished or (trainer.val_every and self.global_step % trainer.val_every == 0):
                        self.metrics |= self.validate()
                    tracker.log(self.global_step, dict(sorted(self.metrics.items())))
                    last = finished or stop.requested or self.global_step == stop_after
                    if last or (trainer.save_every and self.global_step % trainer.save_every == 0):
                        self.save()
                    if last:
                        break
        finally:
            tracker.close()
        if self.global_step < self.total_steps:
            logger.warning(
                "stopped after step %d of %d; the same command continues from there", self.global_step, self.total_steps
            )

    def validate(self) -> dict[str, float]:
        """Cross-entropy for each response token of the validation examples; empty without any."""
        if self.validation is None:
            return {}
        total, count = 0.0, 0
        for start in range(0, len(self.validation), VALIDATION_BATCH_SIZE):
            batch = self.validation.collate(range(start, min(start + VALIDATION_BATCH_SIZE, len(self.validation))))
            log_probs = self.policy.compute_log_probs(batch).batch["old_log_probs"]
            mask = batch.batch["response_mask"].bool()
            total, count = total - float(log_probs[mask].double().sum()), count + int(mask.sum())
        return {"sft/val_loss": total / count}

    def save(self) -> None:
        """Write a checkpoint of everything that reaches a number."""
        with self.run.store.begin(self.global_step) as directory:
            self.group.save(str(directory))
            state = {
                "global_step": self.global_step,
                "loader": self.loader.state_dict(),
                "random": capture_random_state(),
            }
            save_state(state, directory / "controller")

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.group.load(str(checkpoint.directory))
        state = checkpoint.load("controller")
        self.loader.load_state_dict(state["loader"])
        restore_random_state(state["random"])
        self.global_step = state["global_step"]
