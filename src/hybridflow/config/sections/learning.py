"""Learning: the algorithm, actor and critic with their optimizers, and offline training."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES, Estimator, Loss
from hybridflow.config.sections.base import (
    Fraction,
    NoneAsText,
    NonNegative,
    Parameter,
    Positive,
    Section,
    UserFunction,
    named_or_user,
)

if TYPE_CHECKING:  # a type checker cannot read names from a table
    AdvantageName = str
    PolicyLossName = str
else:
    AdvantageName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[tuple(LOSSES)]
AggregationName = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RejectionName = Literal[
    "token_ratio",
    "token_k3",
    "sequence_ratio",
    "sequence_geometric_ratio",
    "sequence_mean_k3",
    "sequence_max_k3",
    "sequence_min_ratio",
]
KLEstimatorName = Literal["k1", "k2", "k3", "abs"]
PreferenceLossName = Literal["dpo", "ipo"]
ScheduleName = Literal["constant", "linear", "cosine"]

Bounds = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    lr: Annotated[float, Field(ge=0)] = Field(default=1e-6, description="Peak learning rate.")
    betas: tuple[DecayRate, DecayRate] = Field(
        default=(0.9, 0.999), description="AdamW's decay rates of the two moments."
    )
    epsilon: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="Decoupled decay of matrices; norms and biases are not decayed."
    )
    clip_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="The global gradient norm is clipped to this."
    )
    schedule: ScheduleName = Field(
        default="constant", description="Learning rate after the warm-up, until trainer.total_steps."
    )
    warmup_steps: NonNegative = Field(
        default=0, description="Optimizer steps over which the learning rate rises linearly from 0."
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="Where linear and cosine schedules end, as a share of lr.")


class AlgorithmConfig(Section):
    advantage: Annotated[AdvantageName | UserFunction, named_or_user(AdvantageName)] = Field(
        default="grpo",
        description="The advantage estimator, or a function of yours (docs/algorithms.md); gae adds a critic, "
        "distillation needs a teacher, with none only the other parts of the loss teach.",
    )
    advantage_kwargs: dict[str, Parameter] = Field(
        default={}, description="Parameters of the estimator that are no keys here, as in {k = 8}."
    )
    gamma: Fraction = Field(default=1.0, description="Discount factor.")
    lam: Fraction = Field(default=1.0, description="GAE's lambda.")
    norm_by_std: bool = Field(default=True, description="grpo, gpg: divide by the group's standard deviation.")
    whiten_advantages: bool = Field(
        default=True, description="GAE: shift and scale advantages to mean 0, variance 1 over the batch."
    )
    kl_in_reward: bool = Field(
        default=False, description="Subtract kl_coef * KL from each token's reward (adds a reference)."
    )
    kl_in_loss: bool = Field(default=False, description="Add kl_coef * KL to the policy loss (adds a reference).")
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.001, description="Weight of the KL term; the start value when the controller is adaptive."
    )
    kl_estimator: KLEstimatorName = Field(
        default="k3", description="Estimator of the KL from log-probs of sampled tokens."
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive steers kl_coef towards kl_target (in reward only)."
    )
    kl_target: Annotated[float, Field(gt=0)] = Field(default=0.1, description="KL the adaptive controller aims for.")
    kl_horizon: Positive = Field(default=10000, description="Samples over which the adaptive controller acts.")
    filter_groups: bool = Field(
        default=False,
        description="Dynamic sampling: leave out groups whose scores are all equal and sample more prompts in their "
        "place, until there are data.train_batch_size groups.",
    )
    max_sampling_rounds: Positive = Field(
        default=8,
        description="filter_groups: batches of prompts that a step samples at most; then groups without a difference "
        "fill what is left.",
    )
    rollout_weights: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Weigh each token's policy loss with the probability ratio of the trainer's policy before the "
        "update to the one that sampled, of the token or of its whole response.",
    )
    rollout_weight_bounds: Bounds = Field(default=(0.0, 2.0), description="Smallest and largest of these weights.")
    rollout_weight_outside: Literal["truncate", "mask"] = Field(
        default="truncate", description="A weight outside of its bounds becomes the nearest bound, or 0."
    )
    rollout_reject: dict[RejectionName, Bounds] = Field(
        default={},
        description="Bounds of statistics of the same ratio outside of which a token, or a whole response, is not "
        "learned from, as in {sequence_mean_k3 = [0.0, 0.01]} (docs/algorithms.md).",
    )

    @property
    def estimator(self) -> Estimator:
        """What `advantage` needs; a function of the user's declares nothing."""
        return ESTIMATORS.get(self.advantage, Estimator(self.advantage))


class ActorConfig(Section):
    mini_batch_size: NonNegative = Field(
        default=0, description="Prompts in one optimizer step; must divide data.train_batch_size. 0 is all of them."
    )
    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    policy_loss: Annotated[PolicyLossName | UserFunction, named_or_user(PolicyLossName)] = Field(
        default="ppo", description="The policy objective, or a function of yours (docs/algorithms.md)."
    )
    policy_loss_kwargs: dict[str, Parameter] = Field(
        default={}, description="Parameters of the policy loss that are no keys here, as in {tau_neg = 1.1}."
    )
    old_log_probs_from: Literal["trainer", "rollout"] = Field(
        default="trainer",
        description="Whose log-probs the ratio compares with: the trainer's, from before the update, or the sampler's.",
    )
    clip_ratio_low: Fraction = Field(default=0.2, description="The ratio is clipped from below at 1 - this.")
    clip_ratio_high: Annotated[float, Field(ge=0)] = Field(
        default=0.2, description="The ratio is clipped from above at 1 + this."
    )
    clip_ratio_dual: Annotated[Annotated[float, Field(gt=1)] | None, NoneAsText] = Field(
        default=3.0,
        description="Dual clip: a negative advantage costs at most this times its size; 'none' turns it off.",
    )
    loss_aggregation: AggregationName = Field(
        default="token-mean", description="How token losses become one number; always against the global count."
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Weight of the entropy bonus in the loss."
    )
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def loss(self) -> Loss:
        """What `policy_loss` needs; a function of the user's declares nothing."""
        return LOSSES.get(self.policy_loss, Loss(self.policy_loss))


class CriticConfig(Section):
    model_path: str = Field(
        default="", description="Directory the critic starts from; empty is model.path. Its value head starts at zero."
    )
    mini_batch_size: NonNegative = Field(
        default=0, description="Prompts in one optimizer step of the critic; 0 is all of them."
    )
    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts.")
    value_clip: Annotated[float, Field(gt=0)] = Field(
        default=0.5, description="New values are clipped to the old ones plus or minus this."
    )
    loss_aggregation: AggregationName = Field(default="token-mean", description="How token losses become one number.")
    warmup_steps: NonNegative = Field(default=0, description="Steps in which only the critic is trained.")
    always: bool = Field(
        default=False,
        description="Train a critic whatever algorithm.advantage is: for a function of yours that reads `values`.",
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class OfflineConfig(Section):
    batch_size: Positive = Field(default=64, description="Examples, or pairs, in one optimizer step.")
    preference_loss: PreferenceLossName = Field(
        default="dpo", description="hybridflow dpo: the loss of a pair, -log sigmoid(margin) or IPO's square."
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        default=0.1, description="hybridflow dpo: how closely the policy is kept to the reference."
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
