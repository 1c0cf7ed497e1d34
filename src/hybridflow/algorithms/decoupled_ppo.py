"""Decoupled PPO for off-policy samples: the behavior policy and the proximal policy are separate."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_in_range
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.ppo import ppo_policy_loss
from hybridflow.algorithms.token_losses import PolicyLoss


def decoupled_ppo_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    rollout_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float | None,
    max_behavior_weight: float = 5.0,
) -> PolicyLoss:
    """Return the decoupled PPO loss of each token; the gradient flows through `log_probs` only.

    https://arxiv.org/abs/2110.00641, equation 2: the behavior policy (`rollout_log_probs`) may be several updates old,
    the proximal policy (`old_log_probs`) is the one before this update:

        weight = min(exp(old_log_probs - rollout_log_probs), max_behavior_weight)
        loss   = weight * the loss of `ppo_policy_loss`

    The bound of the weight is from https://arxiv.org/abs/2505.24298, section 5.2.
    """
    function = "decoupled_ppo_policy_loss"
    require_in_range(function, "max_behavior_weight", max_behavior_weight, minimum=0, above_minimum=True)
    log_weight, _ = policy_columns(function, old_log_probs.detach(), rollout_log_probs, advantages, response_mask)
    loss = ppo_policy_loss(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_dual=clip_ratio_dual,
    )
    weight = ratio_of(log_weight).clamp(max=max_behavior_weight)
    return PolicyLoss(
        torch.where(response_mask, weight * loss.token_losses, 0.0), loss.clipped, loss.clipped_dual, loss.ratio
    )
