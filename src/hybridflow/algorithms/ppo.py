"""Clipped policy loss of PPO, with separate bounds and the dual clip."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_in_range
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.token_losses import PolicyLoss


def ppo_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float | None,
) -> PolicyLoss:
    """Return the PPO loss of each token; the gradient flows through `log_probs` only.

    https://arxiv.org/abs/1707.06347, equation 7, negated, with separate lower and upper bounds
    (https://arxiv.org/abs/2503.14476, section 3.1):

        ratio = exp(log_probs - old_log_probs)
        loss  = -min(ratio * A, clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) * A)

    With `clip_ratio_dual` = c > 1, https://arxiv.org/abs/1912.09729, equation 5: for A < 0 the loss is at most -c * A.
    `advantages` has one value per token or one per row. Where log_probs equals old_log_probs the ratio is exactly 1
    and the gradient is that of -A * log_probs.
    """
    log_ratio, advantages = policy_columns("ppo_policy_loss", log_probs, old_log_probs, advantages, response_mask)
    require_in_range("ppo_policy_loss", "clip_ratio_low", clip_ratio_low, minimum=0, maximum=1)
    require_in_range("ppo_policy_loss", "clip_ratio_high", clip_ratio_high, minimum=0)
    if clip_ratio_dual is not None:
        require_in_range("ppo_policy_loss", "clip_ratio_dual", clip_ratio_dual, minimum=1, above_minimum=True)

    # A times the minimum (A >= 0) or maximum (A < 0) of ratio and clipped ratio is the minimum of the two products.
    ratio = ratio_of(log_ratio)
    lowest, highest = 1 - clip_ratio_low, 1 + clip_ratio_high
    bounded = torch.where(advantages >= 0, ratio.clamp(max=highest), ratio.clamp(min=lowest, max=clip_ratio_dual))
    ratio = ratio.detach()
    clipped_dual = torch.zeros_like(response_mask)
    if clip_ratio_dual is not None:
        clipped_dual = (advantages < 0) & (ratio > clip_ratio_dual)
    return PolicyLoss(
        token_losses=-advantages * bounded,
        clipped=((advantages > 0) & (ratio > highest)) | ((advantages < 0) & (ratio < lowest)),
        clipped_dual=clipped_dual,
        ratio=ratio,
    )
