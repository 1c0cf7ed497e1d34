"""KL from a reference policy, estimated from the log-probs of sampled tokens, for the reward or the loss.

With x sampled from the policy p and q the reference, log r = log q(x) - log p(x).
Estimators: http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_in_range, require_mask, require_name
from hybridflow.algorithms.policy_ratio import MAX_LOG_RATIO, ratio_of


def kl_k1(log_probs: Float[Tensor, "*batch"], ref_log_probs: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return -log r: unbiased, of high variance, negative for half of the tokens; expected gradient 0 as a loss."""
    return log_probs - ref_log_probs


def kl_k2(log_probs: Float[Tensor, "*batch"], ref_log_probs: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return (log r)^2 / 2: biased, of low variance; as a loss its expected gradient is that of the KL."""
    return 0.5 * (log_probs - ref_log_probs).square()


def kl_k3(log_probs: Float[Tensor, "*batch"], ref_log_probs: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return r - 1 - log r: unbiased, never negative, of low variance.

    log r is capped at 20 against overflow: beyond it the value stays at that of 20 nats and the gradient is 0.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def kl_abs(log_probs: Float[Tensor, "*batch"], ref_log_probs: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return |log r|: the distance of the log-probs, not an estimator of the KL."""
    return (log_probs - ref_log_probs).abs()


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "abs": kl_abs,
}
"""KL estimators by configuration name (`algorithm.kl_estimator`): (log_probs, ref_log_probs) -> a number per token."""


def kl_loss(
    *,
    log_probs: Float[Tensor, "batch response_len"],
    ref_log_probs: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    kl_estimator: str,
    old_log_probs: Float[Tensor, "batch response_len"] | None = None,
) -> Float[Tensor, "batch response_len"]:
    """Return the KL of each token, 0 where masked; the caller adds `kl_coef` times it to the policy's token losses.

    The gradient flows through `log_probs`. With `old_log_probs`, those of the policy that sampled, it is multiplied by
    the ratio exp(log_probs - old_log_probs) and the gradient flows through both, so that its expectation is the KL's:
    https://arxiv.org/abs/2512.02556 (DeepSeek-V3.2), equation 7, for k3. The gradient of k2 is the KL's by itself and
    flows through k2 alone; that of abs is the one of the expected absolute log-ratio. The log-ratio is capped at 20,
    and where the cap of k3 holds the gradient is 0. Raises for an unknown estimator.
    """
    require_columns("kl_loss", log_probs=log_probs, ref_log_probs=ref_log_probs)
    require_mask("kl_loss", "response_mask", response_mask, tuple(log_probs.shape), like="log_probs")
    require_name("kl_loss", "KL estimator", kl_estimator, KL_ESTIMATORS)
    kl = _masked_kl(log_probs, ref_log_probs, response_mask, kl_estimator)
    if old_log_probs is None:
        return kl
    require_columns("kl_loss", log_probs=log_probs, old_log_probs=old_log_probs)
    log_ratio = torch.where(response_mask, log_probs - old_log_probs.detach(), 0.0)
    is_capped = ref_log_probs - log_probs > MAX_LOG_RATIO  # the product would push further from the reference
    is_fixed = {"k2": torch.ones_like(is_capped), "k3": is_capped}.get(kl_estimator, torch.zeros_like(is_capped))
    return ratio_of(torch.where(is_fixed, log_ratio.detach(), log_ratio)) * kl


@torch.no_grad()
def apply_kl_penalty(
    *,
    token_level_scores: Float[Tensor, "batch response_len"],
    old_log_probs: Float[Tensor, "batch response_len"],
    ref_log_probs: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    kl_coef: float,
    kl_estimator: str,
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return the rewards with the KL penalty, and the KL of each token; both 0 where masked.

        token_level_rewards = token_level_scores - kl_coef * kl

    https://arxiv.org/abs/1909.08593, section 2, equation 2. Pass `masked_mean` of the KL to a KL controller.
    """
    require_columns(
        "apply_kl_penalty",
        token_level_scores=token_level_scores,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
    )
    require_mask(
        "apply_kl_penalty", "response_mask", response_mask, tuple(token_level_scores.shape), like="token_level_scores"
    )
    require_in_range("apply_kl_penalty", "kl_coef", kl_coef, minimum=0)
    require_name("apply_kl_penalty", "KL estimator", kl_estimator, KL_ESTIMATORS)
    kl = _masked_kl(old_log_probs, ref_log_probs, response_mask, kl_estimator)
    return torch.where(response_mask, token_level_scores, 0.0) - kl_coef * kl, kl


def _masked_kl(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, kl_estimator: str) -> Tensor:
    # Masked before the estimator: masking its result would let a NaN reach the gradient.
    log_probs = torch.where(response_mask, log_probs, 0.0)
    ref_log_probs = torch.where(response_mask, ref_log_probs.detach(), 0.0)
    return KL_ESTIMATORS[kl_estimator](log_probs, ref_log_probs)
