"""Group-relative advantages (GRPO): the mean score of a prompt's responses is the baseline, without a critic."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table
from hybridflow.algorithms.guards import require_in_range


@torch.no_grad()
def grpo_advantages(
    *,
    scores: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    norm_by_std: bool,
    epsilon: float = 1e-6,
) -> tuple[Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    """Return advantages and returns (equal here), one for each row, to be broadcast over its tokens.

    https://arxiv.org/abs/2402.03300, section 4.1.2 (outcome supervision):

        A_i = (r_i - mean(r of i's group)) / (std(r of i's group) + epsilon)

    std is the sample standard deviation (n - 1 in the denominator). `norm_by_std=False` omits the division, as
    https://arxiv.org/abs/2503.20783 (Dr. GRPO) proposes. Groups are the rows with equal `group_ids` (any integers), of
    any size and in any order; the result is bit-identical for every order. A constant group (all scores equal, or only
    one row) has advantage 0. Raises for scores that are not finite.
    """
    require_in_range("grpo_advantages", "epsilon", epsilon, minimum=0)
    table = group_table("grpo_advantages", scores, group_ids)
    deviations = table.deviations(table.mean())
    if norm_by_std:
        deviations = table.over_standard_deviation(deviations, epsilon)
    advantages = table.rows(deviations, like=scores)
    return advantages, advantages.clone()
