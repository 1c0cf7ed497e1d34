"""The mathematics of reinforcement learning for language models: pure functions, tensors in, tensors out.

Knows neither batches, models nor configuration. Columns are keyword-only arguments named as in the glossary of
batch fields, so that a function's signature says what it reads.
"""

from hybridflow.algorithms.advantages import ADVANTAGES
from hybridflow.algorithms.aggregation import AGGREGATIONS, aggregate_loss
from hybridflow.algorithms.gae import gae_advantages
from hybridflow.algorithms.grpo import grpo_advantages
from hybridflow.algorithms.kl import KL_ESTIMATORS, apply_kl_penalty, kl_loss
from hybridflow.algorithms.kl_controller import AdaptiveKLController, FixedKLController
from hybridflow.algorithms.log_probs import (
    VocabularyShare,
    entropy_from_logits,
    log_probs_and_entropy_from_logits,
    log_probs_from_logits,
)
from hybridflow.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from hybridflow.algorithms.partition import balanced_partition, imbalance
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.algorithms.ppo import ppo_policy_loss
from hybridflow.algorithms.token_losses import PolicyLoss, ValueLoss
from hybridflow.algorithms.value_loss import clipped_value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "POLICY_LOSSES",
    "AdaptiveKLController",
    "FixedKLController",
    "PolicyLoss",
    "ValueLoss",
    "VocabularyShare",
    "aggregate_loss",
    "apply_kl_penalty",
    "balanced_partition",
    "clipped_value_loss",
    "entropy_from_logits",
    "gae_advantages",
    "grpo_advantages",
    "imbalance",
    "kl_loss",
    "log_probs_and_entropy_from_logits",
    "log_probs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "ppo_policy_loss",
]
