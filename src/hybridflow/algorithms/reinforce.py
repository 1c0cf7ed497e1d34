"""Policy losses of the form -weight * A * log_prob: the plain policy gradient, and CISPO's clipped weights."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_in_range
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.token_losses import PolicyLoss


def reinforce_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
) -> PolicyLoss:
    """Return the policy gradient loss of each token, without ratio or clip.

    Williams 1992 (https://doi.org/10.1007/BF00992696), equation 11; the loss of https://arxiv.org/abs/2504.02546
    (GPG), equation 5:

        loss = -A * log_probs

    It is correct for on-policy samples, that is, one optimizer step per batch. `old_log_probs` only serve to report the
    deviation from that (`ratio`).
    """
    log_ratio, advantages = policy_columns("reinforce_policy_loss", log_probs, old_log_probs, advantages, response_mask)
    return PolicyLoss(
        token_losses=-advantages * torch.where(response_mask, log_probs, 0.0),
        clipped=torch.zeros_like(response_mask),
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio_of(log_ratio.detach()),
    )


def cispo_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """Return the CISPO loss of each token; the weight is clipped, so every token keeps its gradient.

    https://arxiv.org/abs/2506.13585, equations 4 and 5, negated (sg: stop gradient):

        loss = -sg(clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) * A * log_probs

    The paper has no lower bound (clip_ratio_low = 1). `clipped` marks the tokens with a clipped weight.
    """
    function = "cispo_policy_loss"
    log_ratio, advantages = policy_columns(function, log_probs, old_log_probs, advantages, response_mask)
    require_in_range(function, "clip_ratio_low", clip_ratio_low, minimum=0, maximum=1)
    require_in_range(function, "clip_ratio_high", clip_ratio_high, minimum=0)
    ratio = ratio_of(log_ratio.detach())
    lowest, highest = 1 - clip_ratio_low, 1 + clip_ratio_high
    weight = ratio.clamp(lowest, highest)
    return PolicyLoss(
        token_losses=-weight * advantages * torch.where(response_mask, log_probs, 0.0),
        clipped=((ratio > highest) | (ratio < lowest)) & (advantages != 0),
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio,
    )
