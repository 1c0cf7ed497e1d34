"""REINFORCE with a leave-one-out baseline: the mean of the other responses to the same prompt."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table


@torch.no_grad()
def rloo_advantages(
    *, scores: Float[Tensor, " batch"], group_ids: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    """Return RLOO advantages and returns (equal here), one for each row.

    https://arxiv.org/abs/2402.14740, section 3.2:

        A_i = r_i - mean(r_j of i's group, j != i) = n / (n - 1) * (r_i - mean(r of i's group))

    Unbiased, since the baseline of r_i does not include it. A constant group (one row, or equal scores) has exactly 0.
    Groups may differ in size; the result is bit-identical for every order of the rows. Raises for scores that are not
    finite.
    """
    table = group_table("rloo_advantages", scores, group_ids)
    factor = table.sizes.double() / (table.sizes - 1).clamp(min=1)
    advantages = table.rows(table.deviations(table.mean()) * factor, like=scores)
    return advantages, advantages.clone()
