"""The one algorithm of reinforcement learning: PPO with a critic, GRPO without.

    prompts ──generate──> rollouts ──score──> scores ──┬─ values, old and reference log-probs
                                                       └─> advantages ──> update critic, update actor

The controller holds the algorithm and calls worker groups, which compute. This module knows neither models, nor the
placement of workers, nor how samples and weights travel, nor the run's data, validation and checkpoints.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hybridflow.algorithms import AdaptiveKLController, FixedKLController
from hybridflow.config import ActorConfig, Config, CriticConfig
from hybridflow.controller import Role, WorkerGroup
from hybridflow.protocol import DataProtoFuture
from hybridflow.runtime.observe.metrics import mean_metrics, reduce_lists
from hybridflow.trainers.balance import CostsOf, balanced
from hybridflow.trainers.rl_metrics import log_prob_metrics
from hybridflow.trainers.sampling.sampled import NextPrompts, Sampler, in_order_of_groups, joined
from hybridflow.trainers.stages import (
    add_advantages,
    corrected_rollouts,
    correction_metrics,
    mini_batch_rows,
    needs_old_log_probs,
    needs_token_level_rewards,
    rollout_as_old_log_probs,
    token_level_rewards,
    with_overlong_penalty,
    with_row_ids,
)


class PPO:
    """The algorithm on its worker groups; `critic`, `reference` and `teacher` are None if the recipe does not use them.

    `sample` generates and scores the batch of a step, `sync_weights` loads the trained weights into the engines that
    generate and returns metrics, `costs_of` tells the cost of rows by their lengths. The actor group is trained; with
    LoRA it is the reference with its adapters off. `global_step` counts completed steps; `metrics` are those of the
    current step.
    """

    def __init__(
        self,
        config: Config,
        groups: Mapping[Role, WorkerGroup],
        *,
        sample: Sampler,
        sync_weights: Callable[[], Mapping[str, float]],
        costs_of: CostsOf,
    ) -> None:
        self.config, self.groups, self.costs_of = config, groups, costs_of
        self.metrics: dict[str, Any] = {}
        self.actor = groups[Role.ActorRollout]
        self.critic = groups.get(Role.Critic)
        reference = Role.ActorRollout if config.actor_is_reference else Role.RefPolicy
        self.reference = groups[reference] if config.uses_reference else None
        self.teacher = groups.get(Role.Teacher)
        self.begin(sample, sync_weights)

    def begin(self, sample: Sampler, sync_weights: Callable[[], Mapping[str, float]]) -> None:
        """Begin at step 0 with this sampling and weight sync."""
        self.sample, self.sync_weights = sample, sync_weights
        self.kl_controller = _kl_controller(self.config)
        self.global_step = 0

    def step(self, next_prompts: NextPrompts) -> DataProtoFuture:
        """Make one step on the next batch of prompts; return the batch with all columns that the step added.

        Calls return futures: a call runs as soon as the columns that it reads are computed, and its results stay on
        their worker until another call or the controller reads them.
        """
        config, algorithm = self.config, self.config.algorithm
        trains_actor = self.global_step >= config.critic.warmup_steps
        in_parts, kl_coef = config.learns_in_parts, self.kl_controller.coef
        sums, corrections, kls, updates, parts, imbalances = [], [], [], [], [], []
        self.metrics |= self.sync_weights()  # no-op if generation uses the trained weights themselves
        sampled = self.sample(next_prompts, self.global_step)  # generate and score
        self.metrics |= self.sample.metrics
        for rows in sampled:  # once, with the whole batch; with trainer.stream its parts, as groups finish
            batch = with_row_ids(rows, first=sum(map(len, parts)))
            if config.reward.overlong_buffer:
                batch = with_overlong_penalty(batch, config)
            batch, as_generated, imbalance = self._balanced(batch)
            imbalances.append(imbalance)
            if config.actor.old_log_probs_from == "rollout":
                batch = batch.union(rollout_as_old_log_probs(batch))
            elif needs_old_log_probs(config):
                batch = batch.union(self.actor.compute_log_probs.remote(batch))
                sums.append(self.actor.sum_log_prob_metrics.remote(batch))
            if config.corrects_rollouts:
                weights, correction = corrected_rollouts(batch, algorithm)
                batch = batch.union(weights)
                corrections.append(correction)
            if self.reference:
                batch = batch.union(self.reference.compute_ref_log_probs.remote(batch))
            if self.teacher:
                batch = batch.union(self.teacher.compute_teacher_log_probs.remote(batch))
            if self.critic:
                batch = batch.union(self.critic.compute_values.remote(batch))
            if needs_token_level_rewards(config):
                rewards, kl = token_level_rewards(batch, algorithm, kl_coef)
                batch = batch.union(rewards)
                kls.append(kl)
            if in_parts:
                batch = batch.union(add_advantages(batch, config))
            if in_parts and trains_actor:  # the optimizer step follows the last part
                part = {"part": [len(parts), sampled.num_parts, sampled.num_rows], "kl_coef": kl_coef}
                updates.append(self.actor.update_actor_in_parts.remote(batch.with_meta_info(part)))
            parts.append(batch)
        batch = joined(parts)
        if not in_parts:
            batch = batch.union(add_advantages(batch, config))
        self.metrics |= mean_metrics(imbalances)
        if corrections:
            self.metrics |= correction_metrics(corrections)
        if algorithm.kl_in_reward:
            self._adjust_kl(float(torch.cat(kls).mean()), num_samples=len(batch))
        # Each part was balanced, but a rank's share of all rows is not that of the parts.
        rows = self._balanced(batch)[0] if len(parts) > 1 and (self.critic or not in_parts) else batch
        if self.critic:
            is_apart = self.critic.shares.of_ranks is not self.actor.shares.of_ranks  # other processes, other speeds
            of_critic = self._balanced(batch, self.critic)[0] if is_apart else rows
            steps = self.with_mini_batches(of_critic, config.critic, kl_coef)
            updates.append(self.critic.update_critic.remote(steps))
        if trains_actor and not in_parts:
            steps = self.with_mini_batches(rows, config.actor, kl_coef)
            updates.append(self.actor.update_actor.remote(steps))
        for update in updates:
            self.metrics |= reduce_lists(update.get(()).meta_info["metrics"])
        if sums:
            self.metrics |= log_prob_metrics(sums)
        return in_order_of_groups(batch) if len(parts) > 1 else batch.select_rows(as_generated)

    def _balanced(
        self, batch: DataProtoFuture, group: WorkerGroup | None = None
    ) -> tuple[DataProtoFuture, np.ndarray, dict[str, float]]:
        """Return `balanced` rows for the ranks of a group, by default the actor's."""
        seed_keys = (self.config.trainer.seed, self.global_step)
        return balanced(batch, group or self.actor, self.groups.values(), self.config, seed_keys, self.costs_of)

    def _adjust_kl(self, kl: float, num_samples: int) -> None:
        """Add the KL and its coefficient to the metrics, then update the coefficient for the next step."""
        self.metrics |= {"critic/kl": kl, "critic/kl_coeff": self.kl_controller.coef}
        self.kl_controller.update(kl, num_samples)

    def with_mini_batches(
        self, batch: DataProtoFuture, role: ActorConfig | CriticConfig, kl_coef: float
    ) -> DataProtoFuture:
        """Return the batch with the row ids of its mini-batches and the KL coefficient, for an update call."""
        seed_keys = (self.config.trainer.seed, self.global_step)
        memberships = mini_batch_rows(batch, role.mini_batch_size, role.epochs, seed_keys)
        return batch.with_meta_info({"mini_batches": memberships, "kl_coef": kl_coef, "seed_keys": list(seed_keys)})


def _kl_controller(config: Config) -> AdaptiveKLController | FixedKLController:
    algorithm = config.algorithm
    if algorithm.kl_controller == "adaptive":
        return AdaptiveKLController(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    return FixedKLController(algorithm.kl_coef)
