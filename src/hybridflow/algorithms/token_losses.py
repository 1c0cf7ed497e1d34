"""What a loss says about each token, before `aggregate_loss` makes one number of it."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss per token. Behind the mask: loss 0, not clipped, ratio 1."""

    token_losses: Float[Tensor, "batch response_len"]
    """To be minimised; carries the gradient."""
    clipped: Bool[Tensor, "batch response_len"]
    """The clip range is what determined the loss: this token has no gradient."""
    clipped_dual: Bool[Tensor, "batch response_len"]
    """The dual clip is what determined the loss: this token has no gradient."""
    ratio: Float[Tensor, "batch response_len"]
    """New probability over old one, unclipped, without gradient."""


@dataclass(frozen=True)
class ValueLoss:
    """A value loss per token. Behind the mask: loss 0, not clipped."""

    token_losses: Float[Tensor, "batch response_len"]
    """To be minimised; carries the gradient."""
    clipped: Bool[Tensor, "batch response_len"]
    """The clipped value is what determined the loss: this token has no gradient."""
