"""Losses of pairs: what a policy, or a reward model, pays for not preferring the better response.

Each is a number for each pair, to be averaged over them. `margin` says by how much the better one is preferred.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.errors import AlgorithmConfigError

LogProbs = Float[Tensor, " pairs"]
"""Log-probabilities of whole responses: sums over their tokens."""


class PairLoss(NamedTuple):
    """Of each pair, (pairs,): its loss, and the rewards of the better and the worse response."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    *,
    chosen_log_probs: LogProbs,
    rejected_log_probs: LogProbs,
    chosen_ref_log_probs: LogProbs,
    rejected_ref_log_probs: LogProbs,
    beta: float,
) -> PairLoss:
    """Direct preference optimization: -log sigmoid(r(chosen) - r(rejected)), r = beta * log(policy / reference).

    https://arxiv.org/abs/2305.18290, equation 7. Raises AlgorithmError unless beta > 0.
    """
    chosen, rejected = _rewards(
        beta, chosen_log_probs, rejected_log_probs, chosen_ref_log_probs, rejected_ref_log_probs
    )
    return PairLoss(-logsigmoid(chosen - rejected), chosen, rejected)


def ipo_loss(
    *,
    chosen_log_probs: LogProbs,
    rejected_log_probs: LogProbs,
    chosen_ref_log_probs: LogProbs,
    rejected_ref_log_probs: LogProbs,
    beta: float,
) -> PairLoss:
    """Identity preference optimization: (log(policy / reference) of chosen less that of rejected - 1 / (2 beta))^2.

    https://arxiv.org/abs/2310.12036, equation 17, whose tau is beta. Where DPO pushes a margin for ever, this one
    stops at 1 / (2 beta). The rewards are as in DPO. Raises AlgorithmError unless beta > 0.
    """
    chosen, rejected = _rewards(
        beta, chosen_log_probs, rejected_log_probs, chosen_ref_log_probs, rejected_ref_log_probs
    )
    return PairLoss(((chosen - rejected) / beta - 1 / (2 * beta)).square(), chosen, rejected)


def bradley_terry_loss(*, chosen_scores: Float[Tensor, " pairs"], rejected_scores: Float[Tensor, " pairs"]) -> PairLoss:
    """A reward model's -log P(chosen is preferred) = -log sigmoid(score(chosen) - score(rejected)).

    https://arxiv.org/abs/2203.02155, equation 1, for pairs.
    """
    return PairLoss(-logsigmoid(chosen_scores - rejected_scores), chosen_scores, rejected_scores)


PREFERENCE_LOSSES: dict[str, Callable[..., PairLoss]] = {"dpo": dpo_loss, "ipo": ipo_loss}
"""What `offline.preference_loss` names."""


def _rewards(
    beta: float, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> tuple[Tensor, Tensor]:
    if not beta > 0:
        raise AlgorithmConfigError(
            f"beta={beta} must be above 0: it is how closely the policy is kept to the reference."
        )
    return beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)


def slopes_of(pairs: Callable[..., PairLoss], sums: Tensor, **others: Tensor | float) -> tuple[PairLoss, Tensor]:
    """The pair losses at `sums`, (pairs, 2) of chosen and rejected, and the gradient of their mean there, (pairs, 2).

    To first order the mean loss is linear in the sums with these slopes, and gradients are of first order: a model that
    learns from slope * sum of each response alone learns exactly the pair's loss, whichever micro-batch or rank has
    which response.
    """
    sums = sums.detach().requires_grad_()
    names = ("chosen_log_probs", "rejected_log_probs") if others else ("chosen_scores", "rejected_scores")
    with torch.enable_grad():
        result = pairs(**dict(zip(names, sums.unbind(1), strict=True)), **others)
        (slopes,) = torch.autograd.grad(result.losses.mean(), sums)
    return PairLoss(*(tensor.detach() for tensor in result)), slopes
