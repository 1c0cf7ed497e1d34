"""On-policy RL with an optimal baseline: the group's mean reward, weighted by length."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table
from hybridflow.algorithms.guards import require_mask


@torch.no_grad()
def opo_advantages(
    *,
    scores: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch response_len"],
) -> tuple[Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    """Advantages and returns (equal here), one for each row.

    https://arxiv.org/abs/2505.23585, equation 8: with l_i the length of response i, the baseline that makes the
    variance of the gradient least, where the gradient's squared norm grows with length, is

        A_i = r_i - sum_j(l_j * r_j) / sum_j(l_j)        over i's group

    A group without a difference, of one row or of equal scores, gives exactly 0. Where all responses of a group are
    empty the baseline is the plain mean. Raises for scores that are not finite.
    """
    require_mask("opo_advantages", "response_mask", response_mask, (len(scores), response_mask.shape[-1]), "scores")
    lengths = response_mask.sum(1)
    table = group_table("opo_advantages", scores, group_ids, ties=lengths)
    weights = table.column(lengths)
    total = weights.sum(1, keepdim=True)
    weighted = (weights * table.scores).sum(1, keepdim=True) / total.clamp(min=1)
    baseline = torch.where(total > 0, weighted, table.mean())
    advantages = table.rows(table.deviations(baseline), like=scores)
    return advantages, advantages.clone()
