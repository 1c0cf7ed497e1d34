"""Aggregation of token losses to one number: a sum, or one divided by counts of the whole mini-batch.

Each part of a batch (a micro-batch, a rank's rows) contributes its share; the shares of any split, and their gradients,
add up to the whole. The counts depend on the masks only, so they are known before the first backward pass.
"""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import is_free_to_read, require_columns, require_count, require_mask, require_name
from hybridflow.algorithms.masked import masked_mean, masked_sum
from hybridflow.errors import AlgorithmError

TokenLosses = Float[Tensor, "batch response_len"]
ResponseMask = Bool[Tensor, "batch response_len"]
Loss = Float[Tensor, ""]


def token_mean(token_losses: TokenLosses, response_mask: ResponseMask, *, num_tokens: int, num_sequences: int) -> Loss:
    """Weigh all tokens equally: sum over tokens / num_tokens."""
    return masked_sum(token_losses, response_mask) / max(num_tokens, 1)


def token_sum(token_losses: TokenLosses, response_mask: ResponseMask, *, num_tokens: int, num_sequences: int) -> Loss:
    """Sum over tokens, divided by nothing: the gradient grows with the mini-batch."""
    return masked_sum(token_losses, response_mask)


def seq_mean_token_sum(
    token_losses: TokenLosses, response_mask: ResponseMask, *, num_tokens: int, num_sequences: int
) -> Loss:
    """Sum over each sequence's tokens and average over sequences: sum over tokens / num_sequences."""
    return masked_sum(token_losses, response_mask) / max(num_sequences, 1)


def seq_mean_token_mean(
    token_losses: TokenLosses, response_mask: ResponseMask, *, num_tokens: int, num_sequences: int
) -> Loss:
    """Weigh all sequences equally: average over each sequence's tokens, then over sequences."""
    return masked_mean(token_losses, response_mask, dim=1).sum() / max(num_sequences, 1)


def seq_mean_token_sum_norm(
    token_losses: TokenLosses,
    response_mask: ResponseMask,
    *,
    num_tokens: int,
    num_sequences: int,
    max_response_length: int,
) -> Loss:
    """Sum over each sequence's tokens, divide by the maximum length, average over sequences.

    https://arxiv.org/abs/2503.20783 (Dr. GRPO), section 3.2: short responses get no extra weight.
    """
    return masked_sum(token_losses, response_mask) / (max(num_sequences, 1) * max_response_length)


AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
"""Aggregation functions by configuration name (`actor.loss_aggregation`)."""


def count_of(mode: str, num_tokens: int, num_sequences: int) -> int:
    """Return the count that divides the loss: of tokens for token-mean, 1 for token-sum, else of sequences."""
    return {"token-mean": num_tokens, "token-sum": 1}.get(mode, num_sequences)


def aggregate_loss(
    token_losses: TokenLosses,
    response_mask: ResponseMask,
    mode: str,
    *,
    num_tokens: int,
    num_sequences: int,
    max_response_length: int | None = None,
) -> Loss:
    """Return this part's share of the loss of the whole mini-batch.

    `num_tokens` counts the true entries of the masks of the *whole* mini-batch (all micro-batches, all ranks),
    `num_sequences` its rows with at least one; seq-mean-token-sum-norm also divides by `max_response_length`. If all
    tokens are masked, the loss and its gradient are 0. Raises for an unknown mode, and on CPU, where reading contents
    is free, if the part has more tokens or sequences than the whole.
    """
    require_columns("aggregate_loss", token_losses=token_losses)
    require_mask("aggregate_loss", "response_mask", response_mask, tuple(token_losses.shape), like="token_losses")
    require_name("aggregate_loss", "mode", mode, AGGREGATIONS)
    require_count("aggregate_loss", "num_tokens", num_tokens, minimum=0)
    require_count("aggregate_loss", "num_sequences", num_sequences, minimum=0)
    if is_free_to_read(response_mask):
        _require_within("num_tokens", num_tokens, int(response_mask.sum()))
        _require_within("num_sequences", num_sequences, int(response_mask.any(dim=1).sum()))
    counts: dict[str, int | None] = {"num_tokens": num_tokens, "num_sequences": num_sequences}
    if mode == "seq-mean-token-sum-norm":
        require_count("aggregate_loss", "max_response_length", max_response_length, minimum=1)
        counts["max_response_length"] = max_response_length
    return AGGREGATIONS[mode](token_losses, response_mask, **counts)


def _require_within(name: str, whole: int, part: int) -> None:
    if part > whole:
        raise AlgorithmError(
            f"aggregate_loss: {name}={whole}, but this part alone has {part}; "
            f"{name} must be the count of the whole mini-batch."
        )
