"""Group-relative advantages: the other responses to the same prompt are the baseline; no critic."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hybridflow.algorithms.guards import is_free_to_read, require_columns, require_in_range
from hybridflow.errors import AlgorithmError


@torch.no_grad()
def grpo_advantages(
    *,
    scores: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    norm_by_std: bool,
    epsilon: float = 1e-6,
) -> tuple[Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    """Advantages and returns (equal here), one for each row, to be broadcast over its tokens.

    https://arxiv.org/abs/2402.03300, section 4.1.2 (outcome supervision):

        A_i = (r_i - mean(r of i's group)) / (std(r of i's group) + epsilon)

    std is the sample standard deviation (n - 1 below). `norm_by_std=False` leaves the division out, as
    https://arxiv.org/abs/2503.20783 proposes. Groups are the rows of equal `group_ids` (any integers), of any size
    and in any order; the result, to the bit, does not depend on the order.
    A group without a difference says nothing: all scores equal, or only one row (it would be its own baseline),
    gives advantage 0. Raises for scores that are not finite.
    """
    require_columns("grpo_advantages", "(batch)", scores=scores)
    if group_ids.shape != scores.shape:
        raise AlgorithmError(
            f"grpo_advantages: group_ids has shape {tuple(group_ids.shape)}, but scores has shape "
            f"{tuple(scores.shape)}; both must be (batch)."
        )
    if group_ids.is_floating_point() or group_ids.is_complex() or group_ids.dtype == torch.bool:
        raise AlgorithmError(f"grpo_advantages: group_ids is {group_ids.dtype}; it must be an integer type.")
    require_in_range("grpo_advantages", "epsilon", epsilon, minimum=0)
    if is_free_to_read(scores) and not bool(scores.isfinite().all()):
        row = int((~scores.isfinite()).nonzero()[0])
        raise AlgorithmError(
            f"grpo_advantages: scores[{row}]={scores[row].item()} is not finite; it would spoil its whole group "
            f"(group_ids[{row}]={group_ids[row].item()}). Give such a sample a score."
        )
    if scores.numel() == 0:
        return scores.unsqueeze(1).clone(), scores.unsqueeze(1).clone()

    # One line of the table per group, its scores ascending: sums then meet the same numbers in the same order
    # whatever the order of the rows. In float64, because a mean that is off by a rounding is not zero over a small std.
    _, group_of_row, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    ascending = torch.argsort(scores, stable=True)
    order = ascending[torch.argsort(group_of_row[ascending], stable=True)]
    line = group_of_row[order]
    place = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[line]
    table = scores.new_zeros((len(sizes), int(sizes.max())), dtype=torch.float64)
    table[line, place] = scores[order].double()

    is_filled = torch.arange(table.shape[1], device=table.device) < sizes.unsqueeze(1)
    is_constant = table[:, :1] == table.gather(1, sizes.unsqueeze(1) - 1)
    mean = table.sum(1, keepdim=True) / sizes.unsqueeze(1)
    deviations = torch.where(is_filled & ~is_constant, table - mean, 0.0)
    if norm_by_std:
        variance = deviations.square().sum(1, keepdim=True) / (sizes.unsqueeze(1) - 1).clamp(min=1)
        # A constant group would be 0 / 0 where epsilon is 0.
        deviations = torch.where(is_constant, 0.0, deviations / (variance.sqrt() + epsilon))

    advantages = torch.empty_like(scores)
    advantages[order] = deviations[line, place].to(scores.dtype)
    return advantages.unsqueeze(1), advantages.unsqueeze(1).clone()
