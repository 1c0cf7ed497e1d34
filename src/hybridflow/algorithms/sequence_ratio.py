"""Policy losses with the ratio of a whole response: GSPO and GMPO."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_in_range
from hybridflow.algorithms.masked import masked_mean
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.token_losses import PolicyLoss


def gspo_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """Return the GSPO loss of each token; the gradient flows through `log_probs` only.

    https://arxiv.org/abs/2507.18071, equations 5 and 7, in the token form of equations 13 and 14, which is equal if a
    response has one advantage and otherwise uses the advantage of each token:

        s      = exp(mean over the response of log_probs - old_log_probs)
        s_t    = sg(s) * exp(log_probs_t - sg(log_probs_t))                     = s, with the gradient of its own token
        loss_t = -min(s_t * A_t, clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high) * A_t)

    sg is stop gradient. The paper aggregates by seq-mean-token-mean, with bounds of 3e-4 and 4e-4: a mean of log-ratios
    varies far less than a single one. `ratio` and `clipped` of a token are those of its response.
    """
    function = "gspo_policy_loss"
    log_ratio, advantages = policy_columns(function, log_probs, old_log_probs, advantages, response_mask)
    require_in_range(function, "clip_ratio_low", clip_ratio_low, minimum=0, maximum=1)
    require_in_range(function, "clip_ratio_high", clip_ratio_high, minimum=0)
    sequence_ratio = masked_mean(log_ratio.detach(), response_mask, dim=1).unsqueeze(1)
    ratio = ratio_of(sequence_ratio) * (log_ratio - log_ratio.detach()).exp()
    lowest, highest = 1 - clip_ratio_low, 1 + clip_ratio_high
    bounded = torch.where(advantages >= 0, ratio.clamp(max=highest), ratio.clamp(min=lowest))
    ratio = torch.where(response_mask, ratio.detach(), 1.0)
    return PolicyLoss(
        token_losses=-advantages * bounded,
        clipped=((advantages > 0) & (ratio > highest)) | ((advantages < 0) & (ratio < lowest)),
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio,
    )


def gmpo_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """Return the GMPO loss of each token; the gradient flows through `log_probs` only.

    https://arxiv.org/abs/2507.20673, equations 4 and 5: the geometric mean of a response's ratios, each clipped
    separately, weighs its advantage:

        c_t    = min(log ratio_t, clip_ratio_high) where A_t >= 0, max(log ratio_t, -clip_ratio_low) where A_t < 0
        loss_t = -A_t * exp(mean over the response of c_t)

    The bounds apply to the logarithm (0.4 each in the paper); for the ratio they are exp(-clip_ratio_low) and
    exp(clip_ratio_high). The paper aggregates by seq-mean-token-mean.
    """
    function = "gmpo_policy_loss"
    log_ratio, advantages = policy_columns(function, log_probs, old_log_probs, advantages, response_mask)
    require_in_range(function, "clip_ratio_low", clip_ratio_low, minimum=0)
    require_in_range(function, "clip_ratio_high", clip_ratio_high, minimum=0)
    bounded = torch.where(advantages >= 0, log_ratio.clamp(max=clip_ratio_high), log_ratio.clamp(min=-clip_ratio_low))
    sequence_ratio = ratio_of(masked_mean(bounded, response_mask, dim=1).unsqueeze(1))
    above = (advantages > 0) & (log_ratio > clip_ratio_high)
    below = (advantages < 0) & (log_ratio < -clip_ratio_low)
    return PolicyLoss(
        token_losses=-advantages * sequence_ratio,
        clipped=above | below,
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio_of(log_ratio.detach()),
    )
