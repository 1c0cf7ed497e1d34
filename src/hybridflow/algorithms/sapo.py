"""Soft adaptive policy optimization (SAPO): a smooth gate instead of the clip."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_in_range
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.token_losses import PolicyLoss


def sapo_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """Return the SAPO loss of each token; the gradient flows through `log_probs` only.

    https://arxiv.org/abs/2511.20347, equations 5 and 6, negated:

        loss = -(4 / tau) * sigmoid(tau * (ratio - 1)) * A        tau = tau_pos where A > 0, else tau_neg

    At ratio 1 the gradient is that of -A * log_probs; it decays as the ratio leaves 1, faster for a larger tau.
    No ratio is clipped.
    """
    function = "sapo_policy_loss"
    log_ratio, advantages = policy_columns(function, log_probs, old_log_probs, advantages, response_mask)
    require_in_range(function, "tau_pos", tau_pos, minimum=0, above_minimum=True)
    require_in_range(function, "tau_neg", tau_neg, minimum=0, above_minimum=True)
    ratio = ratio_of(log_ratio)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    return PolicyLoss(
        token_losses=-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau,
        clipped=torch.zeros_like(response_mask),
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio.detach(),
    )
