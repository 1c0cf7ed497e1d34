"""Policy losses that single out the few tokens whose log-prob and advantage vary together most: they cost entropy.

Which tokens these are depends on the whole mini-batch, so that a selection is made before the update, and the loss is
given what was selected.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_in_range, require_mask
from hybridflow.algorithms.policy_ratio import policy_columns, ratio_of
from hybridflow.algorithms.token_losses import PolicyLoss


def covariances(log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """Of each token of a mini-batch, https://arxiv.org/abs/2505.22617, equation 10, in float64:

    (log_prob - mean(log_prob)) * (A - mean(A))
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
    """Tokens without a gradient under Clip-Cov, https://arxiv.org/abs/2505.22617, equation 11: drawn, each as likely,
    from those whose covariance is within [cov_low, cov_high], `selected_share` of all tokens, one at least.
    """
    require_in_range("select_clip_cov", "selected_share", selected_share, minimum=0, maximum=1)
    candidates = ((covariances >= cov_low) & (covariances <= cov_high)).nonzero()[:, 0]
    number = max(1, int(selected_share * len(covariances)))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    return _chosen(covariances, candidates[order[:number].to(candidates.device)])


def select_kl_cov(
    *, covariances: Float[Tensor, " tokens"], seed: int, selected_share: float = 2e-3
) -> Bool[Tensor, " tokens"]:
    """Tokens with a penalty under KL-Cov, https://arxiv.org/abs/2505.22617, equation 13: those of the largest
    covariances, `selected_share` of all tokens, one at least. Of equal ones the first; nothing is drawn by `seed`.
    """
    require_in_range("select_kl_cov", "selected_share", selected_share, minimum=0, maximum=1)
    number = min(len(covariances), max(1, int(selected_share * len(covariances))))
    return _chosen(covariances, torch.argsort(covariances, descending=True, stable=True)[:number])


ROUNDED_BELOW = 1e-3
"""The size of a log-ratio below which KL-Cov's penalty has a slope less than 1."""


def clip_cov_policy_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    advantages: Float[Tensor, " batch #response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    selected_tokens: Bool[Tensor, "batch response_len"],
) -> PolicyLoss:
    """Loss of each token; the gradient flows through `log_probs` alone, and through none of `selected_tokens`.

    https://arxiv.org/abs/2505.22617, equation 12, negated: -ratio * A, and nothing for the tokens that
    `select_clip_cov` drew. No ratio is clipped; `clipped` says which tokens were selected.
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
    """Loss of each token; the gradient flows through `log_probs` alone.

    https://arxiv.org/abs/2505.22617, equation 14, negated: -ratio * A, and for the tokens that `select_kl_cov` chose
    penalty_coef * |log_probs - old_log_probs| besides, which is how the authors take the KL from the old policy. Below
    ROUNDED_BELOW it is rounded off (Huber 1964), since the slope of |x| at 0 would be that of a rounding. No ratio
    is clipped; `clipped` says which tokens were selected.
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


def _chosen(covariances: Tensor, places: Tensor) -> Tensor:
    chosen = torch.zeros(len(covariances), dtype=torch.bool, device=covariances.device)
    chosen[places] = True
    return chosen
