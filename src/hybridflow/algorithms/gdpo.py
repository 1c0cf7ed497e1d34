"""GDPO advantages: several rewards, each normalized within the group before they are added."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table
from hybridflow.algorithms.guards import require_columns, require_in_range
from hybridflow.errors import AlgorithmConfigError


@torch.no_grad()
def gdpo_advantages(
    *,
    reward_components: Float[Tensor, "batch components"],
    group_ids: Int[Tensor, " batch"],
    component_weights: Sequence[float],
    epsilon: float = 1e-6,
) -> tuple[Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    """Return advantages and returns (equal here), one for each row.

    https://arxiv.org/abs/2601.05242, section 3.1, equations 4 to 7: with r_k the k-th component,

        S_i = sum_k w_k * (r_ik - mean(r_k of i's group)) / (std(r_k of i's group) + epsilon)
        A_i = (S_i - mean(S of the batch)) / (std(S of the batch) + epsilon)

    std is the sample standard deviation. Responses whose rewards differ but have the same sum get different advantages,
    and the scale of A does not grow with the number of components. A component that is constant in a group adds 0
    there; if all S of the batch are equal, all advantages are 0. Raises for components that are not finite.
    """
    require_columns("gdpo_advantages", "(batch, components)", reward_components=reward_components)
    require_in_range("gdpo_advantages", "epsilon", epsilon, minimum=0)
    if len(component_weights) != reward_components.shape[1]:
        raise AlgorithmConfigError(
            f"gdpo_advantages: {len(component_weights)} component_weights, but reward_components has "
            f"{reward_components.shape[1]} columns; set one weight for each column."
        )
    total = torch.zeros_like(reward_components[:, :1], dtype=torch.float64)
    for component, weight in zip(reward_components.unbind(1), component_weights, strict=True):
        table = group_table("gdpo_advantages", component, group_ids)
        normed = table.over_standard_deviation(table.deviations(table.mean()), epsilon)
        total = total + weight * table.rows(normed, like=component.double())
    # Sorted, so that the sums over the batch do not depend on the order of rows.
    mean = total.sort(0).values.mean() if len(total) else total.sum()
    deviations = total - mean
    variance = deviations.square().sort(0).values.sum() / max(len(total) - 1, 1)
    is_constant = (total == total[:1]).all() if len(total) else True
    advantages = torch.where(torch.as_tensor(is_constant), 0.0, deviations / (variance.sqrt() + epsilon))
    advantages = advantages.to(reward_components.dtype)
    return advantages, advantages.clone()
