"""Group policy gradient (GPG): the policy gradient of group-relative rewards, corrected for constant groups."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table
from hybridflow.algorithms.guards import require_in_range


@torch.no_grad()
def gpg_advantages(
    *,
    scores: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    norm_by_std: bool,
    epsilon: float = 1e-6,
) -> tuple[Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    """Return advantages and returns (equal here), one for each row.

    https://arxiv.org/abs/2504.02546, section 3.2, equations 6 and 8:

        A_i = alpha * (r_i - mean(r of i's group)) / F        alpha = B / (B - M)

    M of the B groups are constant (all scores equal) and have no gradient; alpha compensates their zeros in the mean
    over the batch. F is 1 with `norm_by_std=False`, else the group's sample standard deviation + epsilon. If all groups
    are constant, all advantages are 0. The matching policy loss is `reinforce`. Raises for scores that are not finite.
    """
    require_in_range("gpg_advantages", "epsilon", epsilon, minimum=0)
    table = group_table("gpg_advantages", scores, group_ids)
    deviations = table.deviations(table.mean())
    if norm_by_std:
        deviations = table.over_standard_deviation(deviations, epsilon)
    num_varied = (~table.is_constant).sum()
    alpha = len(table.sizes) / num_varied.clamp(min=1).double()
    advantages = table.rows(deviations * alpha, like=scores)
    return advantages, advantages.clone()
