"""Importance weights for the mismatch of sampling and training policy, by engine numerics or older weights.

`old_log_probs` are those of the training policy before the update, `rollout_log_probs` those of the sampling policy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_in_range, require_mask, require_name
from hybridflow.algorithms.masked import masked_mean
from hybridflow.algorithms.policy_ratio import MAX_LOG_RATIO
from hybridflow.errors import AlgorithmConfigError


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights of the token losses and the tokens that were out of bounds."""

    weights: Float[Tensor, "batch response_len"]
    """Factor of each token's loss; 0 where masked."""
    bounded: Bool[Tensor, "batch response_len"]
    """True where the weight was out of its bounds."""
    rejected: Bool[Tensor, "batch response_len"]
    """True where a statistic was out of its bounds, so that the weight is 0."""


def _token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio


def _sequence(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio.sum(1, keepdim=True).expand_as(log_ratio)


def _geometric(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(log_ratio, mask, dim=1).unsqueeze(1).expand_as(log_ratio)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": _token, "sequence": _sequence}
"""Log-ratio of a weight by level: that of the token, or the sum over its response."""


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _k3(log_ratio: Tensor) -> Tensor:
    return _exp(log_ratio) - 1 - log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


REJECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token_ratio": lambda log_ratio, mask: _exp(log_ratio),
    "token_k3": lambda log_ratio, mask: _k3(log_ratio),
    "sequence_ratio": lambda log_ratio, mask: _exp(_sequence(log_ratio, mask)),
    "sequence_geometric_ratio": lambda log_ratio, mask: _exp(_geometric(log_ratio, mask)),
    "sequence_mean_k3": lambda log_ratio, mask: _geometric(_k3(log_ratio), mask),
    "sequence_max_k3": lambda log_ratio, mask: (
        torch.where(mask, _k3(log_ratio), 0.0).amax(1, keepdim=True).expand_as(log_ratio)
    ),
    "sequence_min_ratio": lambda log_ratio, mask: (
        torch.where(mask, _exp(log_ratio), torch.inf).amin(1, keepdim=True).expand_as(log_ratio)
    ),
}
"""Statistics that reject tokens or whole responses, by name (`algorithm.rollout_reject`)."""


@torch.no_grad()
def rollout_correction(
    *,
    old_log_probs: Float[Tensor, "batch response_len"],
    rollout_log_probs: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    rollout_weights: str,
    rollout_weight_bounds: tuple[float, float],
    rollout_weight_outside: str,
    rollout_reject: Mapping[str, tuple[float, float]],
) -> RolloutCorrection:
    """Return the factor of each token's loss that corrects for the policy that sampled it.

    With d_t = old_log_probs - rollout_log_probs the weight is exp(d_t) ("token"), exp(sum of d_t over the response)
    ("sequence") or 1 ("none"). Outside `rollout_weight_bounds` it is the nearest bound ("truncate": Ionides 2008,
    https://doi.org/10.1198/106186008X320456, equation 2; by token https://fengyao.notion.site/off-policy-rl) or 0
    ("mask": https://arxiv.org/abs/2510.18855, IcePop).
    Then the weight is 0 for tokens with a statistic of `REJECTIONS` outside its bounds; a statistic of a response
    rejects all its tokens. With r_t = exp(d_t) and k3_t = r_t - 1 - d_t:

        token_ratio r_t, token_k3 k3_t, sequence_ratio prod r_t, sequence_geometric_ratio (prod r_t)^(1/n),
        sequence_mean_k3, sequence_max_k3, sequence_min_ratio

    The counts that divide a loss still include all tokens. Raises for an unknown name and for crossed bounds.
    """
    function = "rollout_correction"
    require_columns(function, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    require_mask(function, "response_mask", response_mask, tuple(old_log_probs.shape), like="old_log_probs")
    require_name(function, "rollout_weights", rollout_weights, {"none": None, **LEVELS})
    require_name(function, "rollout_weight_outside", rollout_weight_outside, {"truncate": None, "mask": None})
    lowest, highest = _bounds("rollout_weight_bounds", rollout_weight_bounds)
    log_ratio = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0)
    weights, bounded = torch.ones_like(log_ratio), torch.zeros_like(response_mask)
    if rollout_weights != "none":
        exact = _exp(LEVELS[rollout_weights](log_ratio, response_mask))
        bounded = response_mask & ((exact < lowest) | (exact > highest))
        weights = exact.clamp(lowest, highest)
        if rollout_weight_outside == "mask":
            weights = torch.where(bounded, 0.0, weights)
    rejected = torch.zeros_like(response_mask)
    for name, bounds in rollout_reject.items():
        require_name(function, "rollout_reject", name, REJECTIONS)
        least, most = _bounds(f"rollout_reject.{name}", bounds)
        statistic = REJECTIONS[name](log_ratio, response_mask)
        rejected |= response_mask & ~((statistic >= least) & (statistic <= most))
    weights = torch.where(response_mask & ~rejected, weights, 0.0)
    return RolloutCorrection(weights, bounded, rejected)


def _bounds(name: str, bounds: tuple[float, float]) -> tuple[float, float]:
    lowest, highest = bounds
    require_in_range("rollout_correction", f"{name}[0]", lowest, minimum=0)
    require_in_range("rollout_correction", f"{name}[1]", highest, minimum=0)
    if lowest > highest:
        raise AlgorithmConfigError(
            f"rollout_correction: {name}={bounds} is invalid: expected (lower, upper) with lower <= upper."
        )
    return lowest, highest
