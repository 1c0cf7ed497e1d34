"""The one loop of reinforcement learning: PPO with a critic, GRPO without.

    prompts ──generate──> rollouts ──score──> scores ──┬─ values, old and reference log-probs
                                                       └─> advantages ──> update critic, update actor

The controller holds the algorithm; the groups compute. It knows neither models nor where workers run.
"""

from typing import Any

from hybridflow.algorithms import AdaptiveKLController, FixedKLController
from hybridflow.checkpoint import Checkpoint, save_state
from hybridflow.config import Config
from hybridflow.controller import WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.errors import CheckpointError
from hybridflow.observability import RL_FIGURES, Tracker, get_logger, reduce_lists, timed
from hybridflow.protocol import DataProto
from hybridflow.runtime import StopRequest, capture_random_state, restore_random_state
from hybridflow.trainers.rl_metrics import batch_metrics, samples_of
from hybridflow.trainers.run_directory import RunDirectory
from hybridflow.trainers.speed import decoder_shape, speed_metrics
from hybridflow.trainers.stages import (
    add_advantages,
    mini_batch_rows,
    needs_token_level_rewards,
    token_level_rewards,
    with_group_ids,
    with_row_ids,
)
from hybridflow.trainers.timed_group import TimedGroup
from hybridflow.trainers.validation import Validator

logger = get_logger(__name__)

TRAINING_STREAM = 0
"""Second entry of a noise key; validation has its own."""


class PPOTrainer:
    """Trains an actor on prompts, with a critic and a reference where the algorithm needs them.

    `actor_rollout` generates and learns; `critic` and `reference` are None where unused. Build it by `build_trainer`.
    """

    def __init__(
        self,
        config: Config,
        *,
        actor_rollout: WorkerGroup,
        rewards: WorkerGroup,
        loader: BatchLoader,
        total_steps: int,
        run: RunDirectory,
        critic: WorkerGroup | None = None,
        reference: WorkerGroup | None = None,
        validator: Validator | None = None,
        peak_flops: float = 0.0,
    ) -> None:
        self.config, self.loader, self.total_steps, self.run = config, loader, total_steps, run
        self.metrics: dict[str, Any] = {}
        self.groups = {"actor": actor_rollout, **({"critic": critic} if critic else {})}
        self.rollout = self.actor = TimedGroup(actor_rollout, self.metrics)
        self.rewards = TimedGroup(rewards, self.metrics)
        self.critic = TimedGroup(critic, self.metrics) if critic else None
        self.reference = TimedGroup(reference, self.metrics) if reference else None
        self.validator = validator
        self.peak_flops, self.shape = peak_flops, decoder_shape(config.model.path)
        algorithm = config.algorithm
        self.kl_controller = (
            AdaptiveKLController(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
            if algorithm.kl_controller == "adaptive"
            else FixedKLController(algorithm.kl_coef)
        )
        self.global_step = 0
        if run.checkpoint:
            self._resume(run.checkpoint)

    # ------------------------------------------------------------------------------------------ the algorithm

    def step(self, prompts: DataProto) -> DataProto:
        """One step of the algorithm on a batch of prompts; returns the batch with every column it made."""
        config, algorithm = self.config, self.config.algorithm
        prompts = with_group_ids(prompts)
        prompts.meta_info["noise_key"] = [config.trainer.seed, TRAINING_STREAM, self.global_step]
        rollouts = self.rollout.generate_sequences(prompts)  # group_size rows for each prompt, in order
        batch = with_row_ids(prompts.repeat(config.rollout.group_size, interleave=True).union(rollouts))
        batch = batch.union(self.rewards.score(batch))
        if not config.is_on_policy or algorithm.kl_in_reward:
            batch = batch.union(self.actor.compute_log_probs(batch))
        if self.reference:
            batch = batch.union(self.reference.compute_ref_log_probs(batch))
        if self.critic:
            batch = batch.union(self.critic.compute_values(batch))
        if needs_token_level_rewards(algorithm):
            rewards, kl = token_level_rewards(batch, algorithm, self.kl_controller.coef)
            batch = batch.union(rewards)
            self.metrics |= {"critic/kl": kl, "critic/kl_coeff": self.kl_controller.coef}
        batch = batch.union(add_advantages(batch, algorithm))
        if self.critic:
            self._update(self.critic.update_critic, batch, config.critic.mini_batch_size, config.critic.epochs)
        if self.global_step >= config.critic.warmup_steps:
            self._update(self.actor.update_actor, batch, config.actor.mini_batch_size, config.actor.epochs)
        if algorithm.kl_in_reward:
            self.kl_controller.update(self.metrics["critic/kl"], len(batch))
        return batch

    def _update(self, update: Any, batch: DataProto, mini_batch_size: int, epochs: int) -> None:
        """Call an update method with the mini-batches that the controller fixes; take in its metrics."""
        seed_keys = (self.config.trainer.seed, self.global_step)
        batch = batch.select()
        batch.meta_info["mini_batches"] = mini_batch_rows(batch, mini_batch_size, epochs, seed_keys)
        batch.meta_info["kl_coef"] = self.kl_controller.coef
        self.metrics |= reduce_lists(update(batch).meta_info["metrics"])

    # ------------------------------------------------------------------------------------------ the run

    def fit(self, stop_after: int | None = None) -> None:
        """Train to the last step; `stop_after` ends earlier, after that step, as a signal does.

        Ctrl-C or SIGTERM finishes the step, saves and returns; a second one exits at once.
        """
        trainer = self.config.trainer
        tracker, console = self.run.trackers(self.total_steps, RL_FIGURES, self.run.path.name)
        try:
            with StopRequest() as stop:
                if self.global_step == 0 and trainer.val_before_train:
                    self._log(tracker, self.validate())
                while self.global_step < self.total_steps:
                    self.metrics.clear()
                    with timed("step", self.metrics):
                        batch = self.step(self.loader.next_batch())
                    self.global_step += 1
                    last = self.global_step in (self.total_steps, stop_after) or stop.requested
                    self._finish_metrics(batch)
                    if _is_due(trainer.val_every, self.global_step, self.global_step == self.total_steps):
                        self.metrics |= self.validate()
                    samples = samples_of(batch, trainer.log_samples, self.global_step)
                    for sample in samples:
                        self.run.samples.write(sample)
                    self._log(tracker, self.metrics)
                    console.log_samples(samples)
                    if _is_due(trainer.save_every, self.global_step, last or stop.requested):
                        self.save()
                    if last or stop.requested:
                        break
        finally:
            tracker.close()
        if self.global_step < self.total_steps:
            logger.warning(
                "stopped after step %d of %d; the same command continues from there", self.global_step, self.total_steps
            )

    def validate(self) -> dict[str, float]:
        """The metrics `val/...` of the present weights; empty without validation data."""
        if self.validator is None:
            return {}
        with timed("validation", self.metrics):
            metrics, _ = self.validator.run()
        return metrics

    def save(self) -> None:
        """Write a checkpoint of everything that reaches a number."""
        with self.run.store.begin(self.global_step) as directory:
            for group in self.groups.values():
                group.save(str(directory))
            save_state(
                {
                    "global_step": self.global_step,
                    "kl_controller": self.kl_controller.state_dict(),
                    "loader": self.loader.state_dict(),
                    "random": capture_random_state(),
                },
                directory / "controller",
            )

    def _resume(self, checkpoint: Checkpoint) -> None:
        if missing := set(self.groups) - set(checkpoint.components):
            raise CheckpointError(
                f"'{checkpoint.directory}' has no {', '.join(sorted(missing))}; it is of a run with other roles. "
                "Choose another trainer.run_dir."
            )
        for group in self.groups.values():
            group.load(str(checkpoint.directory))
        state = checkpoint.load("controller")
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.loader.load_state_dict(state["loader"])
        restore_random_state(state["random"])
        self.global_step = state["global_step"]

    def _finish_metrics(self, batch: DataProto) -> None:
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        self.metrics |= batch_metrics(batch, self.config.data.max_response_length)
        self.metrics["training/epoch"] = self.loader.epoch
        self.metrics |= speed_metrics(
            self.metrics,
            shape=self.shape,
            peak_flops=self.peak_flops,
            sequence_lens=lengths,
            num_response_tokens=int(batch.batch["response_mask"].sum()),
            updates={"actor": self.config.actor.epochs, "critic": self.config.critic.epochs},
        )

    def _log(self, tracker: Tracker, metrics: dict[str, Any]) -> None:
        if metrics:
            tracker.log(self.global_step, dict(sorted(metrics.items())))


def _is_due(every: int, step: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)
