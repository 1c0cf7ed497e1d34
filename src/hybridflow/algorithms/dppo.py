"""Divergence PPO: the change of a token's probability, not its ratio, decides whether its gradient is clipped."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_in_range, require_name
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.token_losses import PolicyLoss


def _binary_tv(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).abs()


def _binary_kl(new: Tensor, old: Tensor) -> Tensor:
    """Return KL(old || new) over the two outcomes, this token or another one."""
    tiny = torch.finfo(new.dtype).tiny
    this = old * (old.clamp(min=tiny).log() - new.clamp(min=tiny).log())
    others = (1 - old) * ((1 - old).clamp(min=tiny).log() - (1 - new).clamp(min=tiny).log())
    return this + others


DIVERGENCES = {"tv": _binary_tv, "kl": _binary_kl}


def dppo_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    divergence: str = "tv",
    max_divergence: float = 0.15,
) -> PolicyLoss:
    """Return the DPPO loss of each token; the gradient flows through `log_probs` only.

    https://arxiv.org/abs/2602.04879, section 4 (binary approximations over two outcomes, this token or any other): with
    p the current and q the old probability of the token,

        D    = |p - q|  ("tv")        or        q log(q / p) + (1 - q) log((1 - q) / (1 - p))  ("kl")
        M    = 0 where D > max_divergence and the step leads further away (A > 0 and p > q, or A < 0 and p < q), else 1
        loss = -ratio * A, with the gradient of -M * ratio * A: the ratio is a constant where M = 0

    The paper compares with the policy that sampled: actor.old_log_probs_from = "rollout". A rare token may multiply its
    probability where PPO would clip the ratio; a frequent token must not lose much of its probability.
    """
    function = "dppo_policy_loss"
    log_ratio, advantages = policy_columns(function, log_probs, old_log_probs, advantages, response_mask)
    require_name(function, "divergence", divergence, DIVERGENCES)
    require_in_range(function, "max_divergence", max_divergence, minimum=0)
    ratio = ratio_of(log_ratio)
    new, old = (torch.where(response_mask, values.detach(), 0.0).exp() for values in (log_probs, old_log_probs))
    is_far = DIVERGENCES[divergence](new, old) > max_divergence
    clipped = is_far & (((advantages > 0) & (new > old)) | ((advantages < 0) & (new < old)))
    return PolicyLoss(
        token_losses=-advantages * torch.where(clipped, ratio.detach(), ratio),
        clipped=clipped,
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio.detach(),
    )
