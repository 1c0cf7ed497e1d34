"""Public names of `hybridflow.algorithms`, which imports this module at the first use of one of them."""

from hybridflow.algorithms.aggregation import AGGREGATIONS, aggregate_loss
from hybridflow.algorithms.covariance import (
    clip_cov_policy_loss,
    covariances,
    kl_cov_policy_loss,
    select_clip_cov,
    select_kl_cov,
)
from hybridflow.algorithms.decoupled_ppo import decoupled_ppo_policy_loss
from hybridflow.algorithms.distillation import distillation_advantages, no_advantages, teacher_kl
from hybridflow.algorithms.dppo import dppo_policy_loss
from hybridflow.algorithms.gae import gae_advantages
from hybridflow.algorithms.gdpo import gdpo_advantages
from hybridflow.algorithms.gpg import gpg_advantages
from hybridflow.algorithms.grpo import grpo_advantages
from hybridflow.algorithms.kl import KL_ESTIMATORS, apply_kl_penalty, kl_loss
from hybridflow.algorithms.kl_controller import AdaptiveKLController, FixedKLController
from hybridflow.algorithms.log_probs import (
    VocabularyShare,
    candidate_log_probs_from_logits,
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
    sum_squared_probs_from_logits,
    top_log_probs_from_logits,
)
from hybridflow.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from hybridflow.algorithms.opo import opo_advantages
from hybridflow.algorithms.optimal_token_baseline import optimal_token_baseline_advantages
from hybridflow.algorithms.partition import balanced_partition, imbalance, proportional_partition
from hybridflow.algorithms.pass_at_k import pass_at_k_advantages
from hybridflow.algorithms.ppo import ppo_policy_loss
from hybridflow.algorithms.preferences import (
    PREFERENCE_LOSSES,
    PairLoss,
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    slopes_of,
)
from hybridflow.algorithms.reinforce import cispo_policy_loss, reinforce_policy_loss
from hybridflow.algorithms.reinforce_plus_plus import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from hybridflow.algorithms.remax import remax_advantages
from hybridflow.algorithms.rloo import rloo_advantages
from hybridflow.algorithms.rollout_weights import REJECTIONS, RolloutCorrection, rollout_correction
from hybridflow.algorithms.sapo import sapo_policy_loss
from hybridflow.algorithms.sequence_ratio import gmpo_policy_loss, gspo_policy_loss
from hybridflow.algorithms.tables import ADVANTAGES, POLICY_LOSSES, SELECTIONS
from hybridflow.algorithms.token_losses import PolicyLoss, ValueLoss
from hybridflow.algorithms.value_loss import clipped_value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "REJECTIONS",
    "SELECTIONS",
    "AdaptiveKLController",
    "FixedKLController",
    "PairLoss",
    "PolicyLoss",
    "RolloutCorrection",
    "ValueLoss",
    "VocabularyShare",
    "aggregate_loss",
    "apply_kl_penalty",
    "balanced_partition",
    "bradley_terry_loss",
    "candidate_log_probs_from_logits",
    "cispo_policy_loss",
    "clip_cov_policy_loss",
    "clipped_value_loss",
    "covariances",
    "decoupled_ppo_policy_loss",
    "distillation_advantages",
    "dpo_loss",
    "dppo_policy_loss",
    "gae_advantages",
    "gdpo_advantages",
    "gmpo_policy_loss",
    "gpg_advantages",
    "grpo_advantages",
    "gspo_policy_loss",
    "imbalance",
    "ipo_loss",
    "kl_cov_policy_loss",
    "kl_loss",
    "log_probs_and_entropy_from_logits",
    "log_probs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "no_advantages",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "pass_at_k_advantages",
    "ppo_policy_loss",
    "proportional_partition",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "reinforce_policy_loss",
    "remax_advantages",
    "rloo_advantages",
    "rollout_correction",
    "sapo_policy_loss",
    "select_clip_cov",
    "select_kl_cov",
    "slopes_of",
    "sum_squared_probs_from_logits",
    "teacher_kl",
    "top_log_probs_from_logits",
]
