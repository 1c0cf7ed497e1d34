"""Keys of the algorithm, of actor and critic with their optimizers, and of offline training."""

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
    SwitchOrAuto,
    UserFunction,
    named_or_user,
)

if TYPE_CHECKING:  # a type checker cannot read names from a table
    AdvantageName = str
    PolicyLossName = str
else:
    AdvantageName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[tuple(LOSSES)]
AggregationName = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
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
    """AdamW, gradient clipping and the learning-rate schedule."""

    lr: Annotated[float, Field(ge=0)] = Field(default=1e-6, description="Peak learning rate.")
    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.999), description="AdamW's beta1 and beta2.")
    epsilon: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="AdamW's epsilon.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.01, description="AdamW's weight decay of matrices; norms and biases have none."
    )
    clip_grad_norm: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Largest global gradient norm; larger gradients are scaled down to it."
    )
    schedule: ScheduleName = Field(
        default="constant", description="Learning-rate schedule from the end of the warm-up to the last step."
    )
    warmup_steps: NonNegative = Field(
        default=0, description="Optimizer steps of the linear learning-rate warm-up from 0."
    )
    min_lr_ratio: Fraction = Field(
        default=0.0, description="Learning rate at the end of the linear and cosine schedules, as a fraction of lr."
    )


class AlgorithmConfig(Section):
    """Advantage estimator, KL penalty, dynamic sampling and rollout correction."""

    advantage: Annotated[AdvantageName | UserFunction, named_or_user(AdvantageName)] = Field(
        default="grpo",
        description="Advantage estimator, or your own function (docs/algorithms.md). gae adds a critic, distillation "
        "needs a teacher; none sets all advantages to 0 and leaves the KL, entropy and teacher losses.",
    )
    advantage_kwargs: dict[str, Parameter] = Field(
        default={}, description="Extra arguments of the advantage estimator that have no key here, as in {k = 8}."
    )
    gamma: Fraction = Field(default=1.0, description="Discount factor.")
    lam: Fraction = Field(default=1.0, description="GAE's lambda.")
    norm_by_std: bool = Field(default=True, description="grpo, gpg: divide by the standard deviation of the group.")
    whiten_advantages: bool = Field(
        default=True, description="gae: normalize advantages to mean 0 and variance 1 over the batch."
    )
    kl_in_reward: bool = Field(
        default=False, description="Subtract kl_coef * KL from the reward of each token (adds a reference model)."
    )
    kl_in_loss: bool = Field(default=False, description="Add kl_coef * KL to the policy loss (adds a reference model).")
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.001, description="Coefficient of each KL penalty; its initial value with the adaptive controller."
    )
    kl_estimator: KLEstimatorName = Field(
        default="k3",
        description="kl_in_loss, kl_in_reward: KL estimator from the log-probs of sampled tokens. Your own is a term "
        "of your own policy loss (docs/algorithms.md).",
    )
    kl_importance_weight: bool = Field(
        default=False,
        description="kl_in_loss: multiply the KL of each token by the probability ratio, which makes its gradient "
        "unbiased (DeepSeek-V3.2).",
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="fixed keeps kl_coef; adaptive adjusts it towards kl_target (only with kl_in_reward).",
    )
    kl_target: Annotated[float, Field(gt=0)] = Field(default=0.1, description="Target KL of the adaptive controller.")
    kl_horizon: Positive = Field(default=10000, description="Horizon of the adaptive controller, in samples.")
    filter_groups: bool = Field(
        default=False,
        description="Dynamic sampling (DAPO): discard groups whose scores are all equal and sample further prompts "
        "until there are data.train_batch_size groups.",
    )
    max_sampling_rounds: Positive = Field(
        default=8,
        description="filter_groups: largest number of prompt batches that a step samples; after that, discarded "
        "groups fill the batch.",
    )
    rollout_weights: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Importance weight of each token's policy loss, against log-prob mismatch: trainer's "
        "probability before the update / sampler's probability, of the token or of its whole response.",
    )
    rollout_weight_bounds: Bounds = Field(default=(0.0, 2.0), description="Lower and upper bound of rollout_weights.")
    rollout_weight_outside: Literal["truncate", "mask"] = Field(
        default="truncate", description="A weight outside its bounds becomes the nearest bound (truncate) or 0 (mask)."
    )
    rollout_reject: dict[RejectionName, Bounds] = Field(
        default={},
        description="Bounds of statistics of the ratio of rollout_weights, as in {sequence_mean_k3 = [0.0, 0.01]}: "
        "a token or response outside its bounds is masked out of the loss (docs/algorithms.md).",
    )

    @property
    def estimator(self) -> Estimator:
        """The needs of the estimator `advantage`; the user's own function may compare any rows."""
        return ESTIMATORS.get(self.advantage, Estimator(self.advantage, compares_batch=True))


class ActorConfig(Section):
    """The policy's loss, mini-batches and optimizer."""

    mini_batch_size: NonNegative = Field(
        default=0, description="Prompts in one optimizer step; must divide data.train_batch_size. 0: all prompts."
    )
    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts (PPO epochs).")
    policy_loss: Annotated[PolicyLossName | UserFunction, named_or_user(PolicyLossName)] = Field(
        default="ppo", description="Policy loss, or your own function (docs/algorithms.md)."
    )
    policy_loss_kwargs: dict[str, Parameter] = Field(
        default={}, description="Extra arguments of the policy loss that have no key here, as in {tau_neg = 1.1}."
    )
    old_log_probs_from: Literal["trainer", "rollout"] = Field(
        default="trainer",
        description="Source of the old log-probs in the probability ratio: the trainer before the update, or the "
        "rollout engine.",
    )
    clip_ratio_low: Fraction = Field(
        default=0.2, description="Lower clip bound of the probability ratio: 1 - clip_ratio_low."
    )
    clip_ratio_high: Annotated[float, Field(ge=0)] = Field(
        default=0.2, description="Upper clip bound of the probability ratio: 1 + clip_ratio_high."
    )
    clip_ratio_dual: Annotated[Annotated[float, Field(gt=1)] | None, NoneAsText] = Field(
        default=3.0,
        description="Dual clip: with a negative advantage the loss is at most clip_ratio_dual * |advantage|; "
        "'none': off.",
    )
    loss_aggregation: AggregationName = Field(
        default="token-mean",
        description="Aggregation of token losses into one number, over the whole mini-batch of all ranks.",
    )
    router_replay: Annotated[bool | Literal["auto"], SwitchOrAuto] = Field(
        default="auto",
        description="Mixture of experts: in training, each token uses the experts that it used in sampling (R3, "
        "docs/rollout.md). auto: if model and rollout engine support it.",
    )
    entropy_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="Coefficient of the entropy bonus in the loss."
    )
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def loss(self) -> Loss:
        """The needs of the policy loss; the user's own function declares none."""
        return LOSSES.get(self.policy_loss, Loss(self.policy_loss))


class CriticConfig(Section):
    """The value model's loss, mini-batches and optimizer."""

    model_path: str = Field(
        default="",
        description="Directory of the critic's initial model; empty: model.path. Its value head starts at zero.",
    )
    mini_batch_size: NonNegative = Field(
        default=0, description="Prompts in one optimizer step; must divide data.train_batch_size. 0: all prompts."
    )
    epochs: Positive = Field(default=1, description="Passes over each batch of rollouts (PPO epochs).")
    value_clip: Annotated[float, Field(gt=0)] = Field(
        default=0.5, description="Clip range of new values around the old ones: old value +- value_clip."
    )
    loss_aggregation: AggregationName = Field(
        default="token-mean", description="Aggregation of token losses into one number."
    )
    warmup_steps: NonNegative = Field(default=0, description="First training steps in which only the critic learns.")
    always: bool = Field(
        default=False,
        description="Train a critic for any algorithm.advantage, such as a function of your own that reads `values`.",
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class OfflineConfig(Section):
    """Offline training: `hybridflow sft`, `dpo` and `reward-model`."""

    batch_size: Positive = Field(
        default=64, description="Examples (sft) or pairs (dpo, reward-model) in one optimizer step."
    )
    preference_loss: PreferenceLossName = Field(
        default="dpo", description="hybridflow dpo: loss of a pair, DPO's -log sigmoid(margin) or IPO's squared error."
    )
    beta: Annotated[float, Field(gt=0)] = Field(
        default=0.1, description="hybridflow dpo: strength of the KL constraint; larger keeps closer to the reference."
    )
    average_log_probs: bool = Field(
        default=False,
        description="hybridflow dpo: average the log-probs over a response's tokens instead of summing them.",
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
