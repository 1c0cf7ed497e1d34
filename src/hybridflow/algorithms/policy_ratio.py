"""First steps of every policy loss: checked columns, masked advantages and the ratio of new to old probability."""

import torch
from jaxtyping import Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_mask
from hybridflow.errors import AlgorithmError

MAX_LOG_RATIO = 20.0
"""Upper bound (its exponential is 4.9e8) against overflow, where 0 * inf would make the gradient NaN."""


def policy_columns(
    function: str, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, " batch #response_len"]]:
    """Return (log_probs - old_log_probs, advantages), both 0 where masked; only `log_probs` has a gradient."""
    require_columns(function, log_probs=log_probs, old_log_probs=old_log_probs)
    require_mask(function, "response_mask", response_mask, tuple(log_probs.shape), like="log_probs")
    if advantages.shape != log_probs.shape and advantages.shape != (log_probs.shape[0], 1):
        raise AlgorithmError(
            f"{function}: advantages has shape {tuple(advantages.shape)}, but log_probs has shape "
            f"{tuple(log_probs.shape)}; advantages must be (batch, response_len) or (batch, 1)."
        )
    log_ratio = torch.where(response_mask, log_probs - old_log_probs.detach(), 0.0)
    return log_ratio, torch.where(response_mask, advantages.detach(), 0.0)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return the exponential of the log-ratio, capped so that it is finite."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
