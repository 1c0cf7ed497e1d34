"""What each advantage estimator and policy loss needs of a run, declared in one line beside its name.

The configuration's checks, the trainer and docs/algorithms.md read it from here and compare no names. No torch here.
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
"""Columns of the glossary that a run makes only for a function that reads them, and what makes them."""


@dataclass(frozen=True)
class Estimator:
    """The needs of an advantage estimator."""

    function: str
    """'file:function' in this package."""
    extra_columns: tuple[str, ...] = ()
    """Which of EXTRA_COLUMNS it reads."""
    compares_groups: bool = False
    """Every advantage is 0 if each prompt has one response."""
    at_most_group_size: tuple[str, int] | None = None
    """A parameter that cannot exceed `rollout.group_size`, and its default."""
    takes_kl_in_reward: bool = True
    """Whether `algorithm.kl_in_reward` has a meaning: it reads sums of rewards, or rewards of tokens."""
    is_zero: bool = False
    """All advantages are 0: only other parts of the loss teach."""


@dataclass(frozen=True)
class Loss:
    """The needs of a policy loss."""

    function: str
    """'file:function' in this package."""
    extra_columns: tuple[str, ...] = ()
    """Which of EXTRA_COLUMNS it reads."""
    selection: str | None = None
    """'file:function' that selects, among all tokens of a mini-batch, its `selected_tokens`."""
    aggregations: tuple[str, ...] = ()
    """The values of `actor.loss_aggregation` that it is defined for; empty: all."""


ESTIMATORS = {
    "gae": Estimator("gae:gae_advantages", extra_columns=("values",)),
    "grpo": Estimator("grpo:grpo_advantages", compares_groups=True),
    "rloo": Estimator("rloo:rloo_advantages", compares_groups=True),
    "reinforce++": Estimator("reinforce_plus_plus:reinforce_plus_plus_advantages"),
    "reinforce++-baseline": Estimator(
        "reinforce_plus_plus:reinforce_plus_plus_baseline_advantages", compares_groups=True
    ),
    "remax": Estimator("remax:remax_advantages", extra_columns=("baseline_scores",)),
    "opo": Estimator("opo:opo_advantages", compares_groups=True),
    "gpg": Estimator("gpg:gpg_advantages", compares_groups=True),
    "pass@k": Estimator(
        "pass_at_k:pass_at_k_advantages", compares_groups=True, at_most_group_size=("k", 4), takes_kl_in_reward=False
    ),
    "gdpo": Estimator(
        "gdpo:gdpo_advantages", extra_columns=("reward_components",), compares_groups=True, takes_kl_in_reward=False
    ),
    "optimal-token-baseline": Estimator(
        "optimal_token_baseline:optimal_token_baseline_advantages",
        extra_columns=("sum_squared_probs",),
        compares_groups=True,
    ),
    "distillation": Estimator("distillation:distillation_advantages", extra_columns=("teacher_log_probs",)),
    "none": Estimator("distillation:no_advantages", is_zero=True),
}
"""By the value of `algorithm.advantage`."""

LOSSES = {
    "ppo": Loss("ppo:ppo_policy_loss"),
    "decoupled-ppo": Loss("decoupled_ppo:decoupled_ppo_policy_loss"),
    "gspo": Loss("sequence_ratio:gspo_policy_loss", aggregations=("seq-mean-token-mean",)),
    "gmpo": Loss("sequence_ratio:gmpo_policy_loss", aggregations=("seq-mean-token-mean",)),
    "cispo": Loss("reinforce:cispo_policy_loss"),
    "sapo": Loss("sapo:sapo_policy_loss"),
    "dppo": Loss("dppo:dppo_policy_loss"),
    "reinforce": Loss("reinforce:reinforce_policy_loss"),
    "clip-cov": Loss("covariance:clip_cov_policy_loss", selection="covariance:select_clip_cov"),
    "kl-cov": Loss("covariance:kl_cov_policy_loss", selection="covariance:select_kl_cov"),
}
"""By the value of `actor.policy_loss`."""
