"""Preference losses: train a policy or a reward model to prefer the chosen response of each pair.

Each loss has one number per pair, to be averaged over pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.errors import AlgorithmConfigError

LogProbs = Float[Tensor, " pairs"]
"""Log-probs of whole responses: sums over their tokens, or with `offline.average_log_probs` means."""


class PairLoss(NamedTuple):
    """The loss of each pair and the rewards of its chosen and rejected response, (pairs,) each."""

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
    """Return the DPO loss, -log sigmoid(r(chosen) - r(rejected)) with r = beta * log(policy / reference).

    https://arxiv.org/abs/2305.18290, equation 7. With means over tokens it is the length-normalized DPO of
    https://arxiv.org/abs/2411.15124 (Tulu 3). Raises AlgorithmError unless beta > 0.
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
    """Return the IPO loss, (h(chosen) - h(rejected) - 1 / (2 beta))^2 with h = log(policy / reference).

    https://arxiv.org/abs/2310.12036, equation 17, whose tau is beta. DPO increases the margin without bound, IPO
    only up to 1 / (2 beta). The paper's probabilities are of whole responses: sums over tokens. With means, the margin
    is one per token. The rewards are as in DPO. Raises AlgorithmError unless beta > 0.
    """
    chosen, rejected = _rewards(
        beta, chosen_log_probs, rejected_log_probs, chosen_ref_log_probs, rejected_ref_log_probs
    )
    return PairLoss(((chosen - rejected) / beta - 1 / (2 * beta)).square(), chosen, rejected)


def bradley_terry_loss(*, chosen_scores: Float[Tensor, " pairs"], rejected_scores: Float[Tensor, " pairs"]) -> PairLoss:
    """Return a reward model's -log P(chosen is preferred) = -log sigmoid(score(chosen) - score(rejected)).

    https://arxiv.org/abs/2203.02155, equation 1, for pairs.
    """
    return PairLoss(-logsigmoid(chosen_scores - rejected_scores), chosen_scores, rejected_scores)


PREFERENCE_LOSSES: dict[str, Callable[..., PairLoss]] = {"dpo": dpo_loss, "ipo": ipo_loss}
"""Preference losses by the value of `offline.preference_loss`."""


def _rewards(
    beta: float, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
) -> tuple[Tensor, Tensor]:
    if not beta > 0:
        raise AlgorithmConfigError(f"beta={beta} must be above 0: it sets how close the policy stays to the reference.")
    return beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)


def slopes_of(pairs: Callable[..., PairLoss], sums: Tensor, **others: Tensor | float) -> tuple[PairLoss, Tensor]:
    """Return the pair losses at `sums`, (pairs, 2) of chosen and rejected, and the gradient of their mean, (pairs, 2).

    Training on slope * sum of each response separately has exactly the gradient of the mean pair loss, so the two
    responses of a pair may be in different micro-batches or on different ranks.
    """
    sums = sums.detach().requires_grad_()
    names = ("chosen_log_probs", "rejected_log_probs") if others else ("chosen_scores", "rejected_scores")
    with torch.enable_grad():
        result = pairs(**dict(zip(names, sums.unbind(1), strict=True)), **others)
        (slopes,) = torch.autograd.grad(result.losses.mean(), sums)
    return PairLoss(*(tensor.detach() for tensor in result)), slopes
