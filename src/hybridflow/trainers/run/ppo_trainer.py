"""The trainer of reinforcement learning: the steps of `PPO` with data, validation, checkpoints and metrics."""

import time
from collections.abc import Mapping
from functools import partial

from hybridflow.checkpoint import Checkpoint
from hybridflow.config import Config
from hybridflow.controller import Role, WorkerGroup
from hybridflow.data import RLHFDataset
from hybridflow.models.model_sizes import decoder_shape, sequence_costs
from hybridflow.rollout.weight_sync.conductor import WeightSync, weight_sync_of
from hybridflow.runtime.alike import require_alike
from hybridflow.runtime.observe import RL_FIGURES, idle_shares, timed
from hybridflow.trainers.build.groups import processes_of
from hybridflow.trainers.ppo import PPO
from hybridflow.trainers.rl_metrics import batch_metrics, lengths_of, staleness_metrics
from hybridflow.trainers.run.rank_speeds import part_metrics
from hybridflow.trainers.run.run_trainer import RunParts, RunTrainer
from hybridflow.trainers.run.samples import Samples, samples_of
from hybridflow.trainers.run.training_state import CONTROLLER, TrainingSaver, restore_training
from hybridflow.trainers.sampling.ahead import Ahead, describe_pending, save_pending, wait_for
from hybridflow.trainers.sampling.in_flight import EngineScheduleLog
from hybridflow.trainers.sampling.sampling import Sampling
from hybridflow.trainers.stages import updates_per_step
from hybridflow.trainers.validation import Validator


def connections(
    config: Config, groups: Mapping[Role, WorkerGroup], total_steps: int
) -> tuple[Sampling | Ahead, WeightSync]:
    """Return how samples come to the algorithm and how weights leave it; both have begun nothing."""
    actor = groups[Role.ActorRollout]
    sampling = Sampling(config, groups.get(Role.Rollout, actor), groups[Role.Reward])
    sample = Ahead(sampling, config.trainer.lag, total_steps) if config.trainer.lag else sampling
    return sample, weight_sync_of(config, actor, groups.get(Role.Rollout))


class PPOTrainer(PPO, RunTrainer):
    """A run of `PPO.step` on batches of prompts. Build it with `build_trainer`."""

    def __init__(self, parts: RunParts[RLHFDataset], validator: Validator | None = None) -> None:
        config, groups = parts.config, parts.groups
        self.rollout, self.rewards = groups.get(Role.Rollout, groups[Role.ActorRollout]), groups[Role.Reward]
        costs_of = partial(sequence_costs, decoder_shape(config.model.path))
        sample, self.weight_sync = connections(config, groups, parts.total_steps)
        PPO.__init__(self, config, groups, sample=sample, sync_weights=self.weight_sync, costs_of=costs_of)
        self.write_schedule = EngineScheduleLog(config, parts.run, self.rollout)
        self.figures, self.validator = RL_FIGURES, validator
        RunTrainer.__init__(self, parts, [self.actor, *([self.critic] if self.critic else []), self.rewards])

    def start_over(self) -> None:
        """Forget all steps and what they have begun on the groups, whose own state is kept."""
        sample, self.weight_sync = connections(self.config, self.groups, self.total_steps)
        self.begin(sample, self.weight_sync)
        self.write_schedule = EngineScheduleLog(self.config, self.run, self.rollout)

    @property
    def ahead(self) -> Ahead | None:
        """The batches that are sampled ahead; None without trainer.lag."""
        return self.sample if isinstance(self.sample, Ahead) else None

    def restore(self, checkpoint: Checkpoint, *, verify: bool = False) -> None:
        """Continue from a checkpoint or a snapshot; with `verify`, compare the state of the workers with it."""
        self.start_over()
        state = restore_training(checkpoint, self.stateful_groups, self.loader, verify=verify)
        kept = {"kl_controller": self.kl_controller.state_dict()}
        require_alike(state, kept, f"the state '{checkpoint.directory / CONTROLLER}'")
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.global_step = state["global_step"]
        if self.ahead:
            self.ahead.restore(checkpoint, state.get("pending", []))
        if self.config.rollout.replay:
            self.rollout.resume_schedule(self.global_step)

    def train_step(self) -> Samples:
        """Make one `step` on the next batch and fill `metrics`; return samples to log."""
        self.metrics.clear()
        start = time.time()
        self.metrics["training/epoch"] = self.global_step // len(self.loader) if self.ahead else self.loader.epoch
        with timed("step", self.metrics):
            batch = self.step(self.loader.next_batch)
            self.metrics |= batch_metrics(batch, self.config.data.max_response_length)
            if self.ahead:
                updates = updates_per_step(self.config, self.config.actor)
                version = updates * max(0, self.global_step - self.config.critic.warmup_steps)
                self.metrics |= staleness_metrics(batch, version, updates) | self.ahead.take_wait()
        self.global_step += 1
        self.write_schedule(self.global_step)
        end = time.time()
        self.metrics |= self.trace_metrics() | part_metrics(self.groups)
        if self.backend:
            processes = processes_of(self.config, self.groups)
            self.metrics |= idle_shares(self.events, self.backend.running(), processes, start, end)
        self.metrics |= self.speedometer.read(self.metrics, lengths_of(batch))
        return samples_of(batch, self.config, self.global_step)

    def validate(self) -> dict[str, float]:
        """Return the metrics `val/...` of the current weights; empty without validation data."""
        if self.validator is None:
            return {}
        self.metrics |= self.weight_sync() | self.weight_sync.finish()
        self.write_schedule(self.global_step)
        with timed("validation", self.metrics):
            metrics, _ = self.validator.run()
        return metrics

    def save(self) -> None:
        """Save a checkpoint of the full training state, or begin to save it in the background."""
        self.weight_sync.finish()
        if self.ahead and self.config.updates_in_flight:  # later weights must not reach them
            wait_for(self.ahead.pending())
        self.save_with(self.saver)

    def save_with(self, saver: TrainingSaver) -> None:
        """Save the training state, or begin to; a batch that has begun is written at the end of the save."""
        pending = self.ahead.pending() if self.ahead else []
        saver.save(
            self.global_step,
            lambda directory: save_pending(pending, directory),
            kl_controller=self.kl_controller.state_dict(),
            pending=describe_pending(pending),
        )
