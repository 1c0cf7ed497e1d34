"""On-policy RL with optimal reward baseline (OPO): the group's mean reward weighted by response length."""

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
    """Return advantages and returns (equal here), one for each row.

    https://arxiv.org/abs/2505.23585, equation 8: with l_i the length of response i, and if the squared norm of the
    gradient grows with length, the baseline with the least gradient variance gives

        A_i = r_i - sum_j(l_j * r_j) / sum_j(l_j)        over i's group

    A constant group (one row, or equal scores) has exactly 0. If all responses of a group are empty, the baseline is
    the plain mean. Raises for scores that are not finite.
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
