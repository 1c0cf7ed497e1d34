"""Group policy gradient: the plain policy gradient of group-relative rewards, corrected for groups that say nothing."""

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
    """Advantages and returns (equal here), one for each row.

    https://arxiv.org/abs/2504.02546, section 3.2, equations 6 and 8:

        A_i = alpha * (r_i - mean(r of i's group)) / F        alpha = B / (B - M)

    of B groups M are without a difference (all scores equal) and have no gradient; alpha keeps the mean over the batch
    from shrinking with them. F is 1 with `norm_by_std=False`, else the group's sample standard deviation + epsilon.
    If no group has a difference all advantages are 0. Its policy loss is `reinforce`. Raises for scores that are not
    finite.
    """
    require_in_range("gpg_advantages", "epsilon", epsilon, minimum=0)
    table = group_table("gpg_advantages", scores, group_ids)
    deviations = table.deviations(table.mean())
    if norm_by_std:
        deviations = table.over_standard_deviation(deviations, epsilon)
    num_speaking = (~table.is_constant).sum()
    alpha = len(table.sizes) / num_speaking.clamp(min=1).double()
    advantages = table.rows(deviations * alpha, like=scores)
    return advantages, advantages.clone()
