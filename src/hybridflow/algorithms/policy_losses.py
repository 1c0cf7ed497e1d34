"""The table of policy losses by configuration name (`actor.policy_loss`).

A policy loss takes columns and parameters as keyword-only arguments and returns a `PolicyLoss`.
"""

from collections.abc import Callable

from hybridflow.algorithms.covariance import clip_cov_policy_loss, kl_cov_policy_loss
from hybridflow.algorithms.decoupled_ppo import decoupled_ppo_policy_loss
from hybridflow.algorithms.dppo import dppo_policy_loss
from hybridflow.algorithms.ppo import ppo_policy_loss
from hybridflow.algorithms.reinforce import cispo_policy_loss, reinforce_policy_loss
from hybridflow.algorithms.sapo import sapo_policy_loss
from hybridflow.algorithms.sequence_ratio import gmpo_policy_loss, gspo_policy_loss
from hybridflow.algorithms.token_losses import PolicyLoss

POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "ppo": ppo_policy_loss,
    "decoupled-ppo": decoupled_ppo_policy_loss,
    "gspo": gspo_policy_loss,
    "gmpo": gmpo_policy_loss,
    "cispo": cispo_policy_loss,
    "sapo": sapo_policy_loss,
    "dppo": dppo_policy_loss,
    "reinforce": reinforce_policy_loss,
    "clip-cov": clip_cov_policy_loss,
    "kl-cov": kl_cov_policy_loss,
}
