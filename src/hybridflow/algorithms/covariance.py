"""Policy losses with a special rule for tokens of high covariance of log-prob and advantage, which reduce entropy.

The selection depends on the whole mini-batch, so it is made before the update and passed to the loss.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_in_range, require_mask
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.token_losses import PolicyLoss


def covariances(log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Return the covariance of log-prob and advantage of each token of a mini-batch, in float64.

    https://arxiv.org/abs/2505.22617, equation 10: (log_prob - mean(log_prob)) * (A - mean(A))
    """
    require_columns("covariances", "(tokens)", log_probs=log_probs, advantages=advantages)
    log_probs, advantages = log_probs.double(), advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def select_clip_cov(
    *,
    covariances: Float[Tensor, " tokens"],
    seed: int,
    selected_share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Bool[Tensor, " tokens"]:
    """Select the tokens without a gradient under Clip-Cov, https://arxiv.org/abs/2505.22617, equation 11.

    They are drawn uniformly from the tokens whose covariance is within [cov_low, cov_high]: `selected_share` of all
    tokens, at least one.
    """
    require_in_range("select_clip_cov", "selected_share", selected_share, minimum=0, maximum=1)
    candidates = ((covariances >= cov_low) & (covariances <= cov_high)).nonzero()[:, 0]
    number = max(1, int(selected_share * len(covariances)))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _mask_of(covariances, candidates[order[:number].to(candidates.device)])


def select_kl_cov(
    *, covariances: Float[Tensor, " tokens"], seed: int, selected_share: float = 2e-3
) -> Bool[Tensor, " tokens"]:
    """Select the tokens with a penalty under KL-Cov, https://arxiv.org/abs/2505.22617, equation 13.

    They are the tokens with the largest covariances: `selected_share` of all tokens, at least one. Among equal ones the
    first is selected; `seed` is not used.
    """
    require_in_range("select_kl_cov", "selected_share", selected_share, minimum=0, maximum=1)
    number = min(len(covariances), max(1, int(selected_share * len(covariances))))
    return _mask_of(covariances, torch.argsort(covariances, descending=True, stable=True)[:number])


ROUNDED_BELOW = 1e-3
"""Absolute log-ratio below which KL-Cov's penalty has a slope less than 1."""


def clip_cov_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    selected_tokens: Bool[Tensor, "batch response_len"],
) -> PolicyLoss:
    """Return the Clip-Cov loss of each token.

    The gradient flows through `log_probs` only, except at `selected_tokens`. https://arxiv.org/abs/2505.22617,
    equation 12, negated: -ratio * A, and 0 for the tokens that `select_clip_cov` drew. No ratio is clipped; `clipped`
    marks the selected tokens.
    """
    function = "clip_cov_policy_loss"
    log_ratio, advantages = policy_columns(function, log_probs, old_log_probs, advantages, response_mask)
    require_mask(function, "selected_tokens", selected_tokens, tuple(log_probs.shape), like="log_probs")
    selected = selected_tokens & response_mask
    ratio = ratio_of(log_ratio)
    return PolicyLoss(
        token_losses=torch.where(selected, 0.0, -advantages * ratio),
        clipped=selected,
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio.detach(),
    )


def kl_cov_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    selected_tokens: Bool[Tensor, "batch response_len"],
    penalty_coef: float = 1.0,
) -> PolicyLoss:
    """Return the KL-Cov loss of each token; the gradient flows through `log_probs` only.

    https://arxiv.org/abs/2505.22617, equation 14, negated: -ratio * A, plus penalty_coef * |log_probs - old_log_probs|
    for the tokens that `select_kl_cov` selected, the authors' estimate of the KL from the old policy. Below
    ROUNDED_BELOW the penalty is smooth (Huber 1964), since the sign of |x| near 0 would depend on rounding. No ratio is
    clipped; `clipped` marks the selected tokens.
    """
    function = "kl_cov_policy_loss"
    log_ratio, advantages = policy_columns(function, log_probs, old_log_probs, advantages, response_mask)
    require_mask(function, "selected_tokens", selected_tokens, tuple(log_probs.shape), like="log_probs")
    require_in_range(function, "penalty_coef", penalty_coef, minimum=0)
    selected = selected_tokens & response_mask
    ratio = ratio_of(log_ratio)
    distance = (
        F.huber_loss(log_ratio, torch.zeros_like(log_ratio), reduction="none", delta=ROUNDED_BELOW) / ROUNDED_BELOW
    )
    return PolicyLoss(
        token_losses=-advantages * ratio + torch.where(selected, penalty_coef * distance, 0.0),
        clipped=selected,
        clipped_dual=torch.zeros_like(response_mask),
        ratio=ratio.detach(),
    )


def _mask_of(covariances: Tensor, indices: Tensor) -> Tensor:
    mask = torch.zeros(len(covariances), dtype=torch.bool, device=covariances.device)
    mask[indices] = True
    return mask
