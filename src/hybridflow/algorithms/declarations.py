"""Declarations of the advantage estimators and policy losses: what each one needs from a run, one line per name.

The configuration's checks, the trainer and docs/algorithms.md read these declarations instead of comparing names. This
module does not import torch.
"""

from dataclasses import dataclass

EXTRA_COLUMNS = {
    "values": "a critic",
    "ref_log_probs": "a reference model",
    "teacher_log_probs": "`teacher.model_path`",
    "reward_components": "`reward.weights`",
    "baseline_scores": "a greedy response to each prompt",
    "sum_squared_probs": 'old log-probs of the trainer (`actor.old_log_probs_from = "trainer"`)',
}
"""Columns that a run computes only for a function that reads them, and their sources."""


@dataclass(frozen=True)
class Estimator:
    """Requirements of an advantage estimator."""

    function: str
    """'file:function' in this package."""
    extra_columns: tuple[str, ...] = ()
    """Columns of EXTRA_COLUMNS that it reads."""
    compares_groups: bool = False
    """True if all advantages are 0 with one response per prompt."""
    at_most_group_size: tuple[str, int] | None = None
    """A parameter that must not exceed `rollout.group_size`, and its default."""
    takes_kl_in_reward: bool = True
    """True if it supports `algorithm.kl_in_reward`: it reads sums of rewards, or rewards of tokens."""
    compares_batch: bool | str = False
    """True if an advantage depends on rows of other groups, or a key of [algorithm] that makes it do so if true."""
    is_zero: bool = False
    """True if all advantages are 0, so that only other parts of the loss have a gradient."""


@dataclass(frozen=True)
class Loss:
    """Requirements of a policy loss."""

    function: str
    """'file:function' in this package."""
    extra_columns: tuple[str, ...] = ()
    """Columns of EXTRA_COLUMNS that it reads."""
    selection: str | None = None
    """'file:function' that selects its `selected_tokens` among all tokens of a mini-batch."""
    aggregations: tuple[str, ...] = ()
    """Supported values of `actor.loss_aggregation`; empty: all."""
    has_behavior_weight: bool = False
    """True if it weights each token by the probability under the trainer / under the sampler itself."""


ESTIMATORS = {
    "gae": Estimator("gae:gae_advantages", extra_columns=("values",), compares_batch="whiten_advantages"),
    "grpo": Estimator("grpo:grpo_advantages", compares_groups=True),
    "rloo": Estimator("rloo:rloo_advantages", compares_groups=True),
    "reinforce++": Estimator("reinforce_plus_plus:reinforce_plus_plus_advantages", compares_batch=True),
    "reinforce++-baseline": Estimator(
        "reinforce_plus_plus:reinforce_plus_plus_baseline_advantages", compares_groups=True, compares_batch=True
    ),
    "remax": Estimator("remax:remax_advantages", extra_columns=("baseline_scores",)),
    "opo": Estimator("opo:opo_advantages", compares_groups=True),
    "gpg": Estimator("gpg:gpg_advantages", compares_groups=True, compares_batch=True),
    "pass@k": Estimator(
        "pass_at_k:pass_at_k_advantages", compares_groups=True, at_most_group_size=("k", 4), takes_kl_in_reward=False
    ),
    "gdpo": Estimator(
        "gdpo:gdpo_advantages",
        extra_columns=("reward_components",),
        compares_groups=True,
        compares_batch=True,
        takes_kl_in_reward=False,
    ),
    "optimal-token-baseline": Estimator(
        "optimal_token_baseline:optimal_token_baseline_advantages",
        extra_columns=("sum_squared_probs",),
        compares_groups=True,
    ),
    "distillation": Estimator("distillation:distillation_advantages", extra_columns=("teacher_log_probs",)),
    "none": Estimator("distillation:no_advantages", is_zero=True),
}
"""Estimators by the value of `algorithm.advantage`."""

LOSSES = {
    "ppo": Loss("ppo:ppo_policy_loss"),
    "decoupled-ppo": Loss("decoupled_ppo:decoupled_ppo_policy_loss", has_behavior_weight=True),
    "gspo": Loss("sequence_ratio:gspo_policy_loss", aggregations=("seq-mean-token-mean",)),
    "gmpo": Loss("sequence_ratio:gmpo_policy_loss", aggregations=("seq-mean-token-mean",)),
    "cispo": Loss("reinforce:cispo_policy_loss"),
    "sapo": Loss("sapo:sapo_policy_loss"),
    "dppo": Loss("dppo:dppo_policy_loss"),
    "reinforce": Loss("reinforce:reinforce_policy_loss"),
    "clip-cov": Loss("covariance:clip_cov_policy_loss", selection="covariance:select_clip_cov"),
    "kl-cov": Loss("covariance:kl_cov_policy_loss", selection="covariance:select_kl_cov"),
}
"""Policy losses by the value of `actor.policy_loss`."""
