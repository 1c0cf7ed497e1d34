"""Clipped squared error of the critic."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_in_range, require_mask
from hybridflow.algorithms.token_losses import ValueLoss


def clipped_value_loss(
    *,
    new_values: Float[Tensor, "batch response_len"],
    values: Float[Tensor, "batch response_len"],
    returns: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    value_clip: float,
) -> ValueLoss:
    """Return the value loss of each token; the gradient flows through `new_values` (the critic's current values) only.

        loss = 0.5 * max((v - R)^2, (clip(v, V - value_clip, V + value_clip) - R)^2)

    with v = new_values, V = values (of the rollout) and R = returns: the pessimistic bound of
    https://arxiv.org/abs/2005.12729, section 3, so that one batch cannot move the critic far.
    """
    require_columns("clipped_value_loss", new_values=new_values, values=values, returns=returns)
    require_mask("clipped_value_loss", "response_mask", response_mask, tuple(new_values.shape), like="new_values")
    require_in_range("clipped_value_loss", "value_clip", value_clip, minimum=0, above_minimum=True)

    new_values = torch.where(response_mask, new_values, 0.0)
    values = torch.where(response_mask, values.detach(), 0.0)
    returns = torch.where(response_mask, returns.detach(), 0.0)
    losses = 0.5 * (new_values - returns).square()
    clipped_losses = 0.5 * (new_values.clamp(values - value_clip, values + value_clip) - returns).square()
    clipped = clipped_losses > losses
    return ValueLoss(token_losses=torch.where(clipped, clipped_losses, losses), clipped=clipped)
