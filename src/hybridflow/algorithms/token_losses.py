"""Losses per token with their statistics, before `aggregate_loss` reduces them to one number."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss per token. Masked tokens have loss 0 and ratio 1 and are not clipped."""

    token_losses: Float[Tensor, "batch response_len"]
    """Values to minimize, with gradient."""
    clipped: Bool[Tensor, "batch response_len"]
    """True if the clip range determined the loss, so that the token has no gradient."""
    clipped_dual: Bool[Tensor, "batch response_len"]
    """True if the dual clip determined the loss, so that the token has no gradient."""
    ratio: Float[Tensor, "batch response_len"]
    """New probability divided by the old one, unclipped, without gradient."""


@dataclass(frozen=True)
class ValueLoss:
    """A value loss per token. Masked tokens have loss 0 and are not clipped."""

    token_losses: Float[Tensor, "batch response_len"]
    """Values to minimize, with gradient."""
    clipped: Bool[Tensor, "batch response_len"]
    """True if the clipped value determined the loss, so that the token has no gradient."""
