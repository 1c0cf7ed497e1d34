"""Table of a batch's scores by group, sorted, so that sums do not depend on the order of the rows."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hybridflow.algorithms.guards import is_free_to_read, require_columns
from hybridflow.errors import AlgorithmError


@dataclass(frozen=True)
class GroupTable:
    """One line per group with its scores ascending; entries beyond the end of a group are 0.

    Scores are float64, since a rounding error of the mean is amplified by a small standard deviation.
    """

    scores: Float[Tensor, "groups largest"]
    is_filled: Bool[Tensor, "groups largest"]
    sizes: Int[Tensor, "groups 1"]
    is_constant: Bool[Tensor, "groups 1"]
    """True if all scores of the group are equal, as in a group of one."""
    row_of_place: Int[Tensor, " batch"]
    line: Int[Tensor, " batch"]
    place: Int[Tensor, " batch"]

    def column(self, values: Shaped[Tensor, " batch"]) -> Float[Tensor, "groups largest"]:
        """Return another number of each row in the layout of the scores."""
        table = torch.zeros_like(self.scores)
        table[self.line, self.place] = values[self.row_of_place].double()
        return table

    def mean(self) -> Float[Tensor, "groups 1"]:
        """Return the mean score of each group."""
        return self.scores.sum(1, keepdim=True) / self.sizes

    def deviations(self, baseline: Float[Tensor, "groups 1"]) -> Float[Tensor, "groups largest"]:
        """Return score - baseline; exactly 0 in a constant group and beyond the end of a group."""
        return torch.where(self.is_filled & ~self.is_constant, self.scores - baseline, 0.0)

    def standard_deviation(self) -> Float[Tensor, "groups 1"]:
        """Return the sample standard deviation (n - 1 in the denominator) of each group; 0 in a constant group."""
        squares = self.deviations(self.mean()).square().sum(1, keepdim=True)
        return (squares / (self.sizes - 1).clamp(min=1)).sqrt()

    def over_standard_deviation(
        self, deviations: Float[Tensor, "groups largest"], epsilon: float
    ) -> Float[Tensor, "groups largest"]:
        """Return deviations / (std + epsilon); 0 in a constant group, also with epsilon 0."""
        return torch.where(self.is_constant, 0.0, deviations / (self.standard_deviation() + epsilon))

    def rows(self, table: Float[Tensor, "groups largest"], like: Float[Tensor, " batch"]) -> Float[Tensor, "batch 1"]:
        """Return the entries of the table in the order of the rows, (batch, 1), in the dtype of `like`."""
        numbers = torch.empty_like(like)
        numbers[self.row_of_place] = table[self.line, self.place].to(like.dtype)
        return numbers.unsqueeze(1)


def group_table(function: str, scores: Tensor, group_ids: Tensor, *, ties: Tensor | None = None) -> GroupTable:
    """Build the table of groups: rows with equal `group_ids` (any integers), of any size and in any order.

    `ties` orders the rows of a group with equal scores, for sums that depend on it. Raises for scores that are not
    finite.
    """
    require_columns(function, "(batch)", scores=scores)
    if group_ids.shape != scores.shape:
        raise AlgorithmError(
            f"{function}: group_ids has shape {tuple(group_ids.shape)}, but scores has shape {tuple(scores.shape)}; "
            "both must be (batch)."
        )
    if group_ids.is_floating_point() or group_ids.is_complex() or group_ids.dtype == torch.bool:
        raise AlgorithmError(f"{function}: group_ids is {group_ids.dtype}; it must be an integer type.")
    if is_free_to_read(scores) and not bool(scores.isfinite().all()):
        row = int((~scores.isfinite()).nonzero()[0])
        raise AlgorithmError(
            f"{function}: scores[{row}]={scores[row].item()} is not finite, which would invalidate its whole group "
            f"(group_ids[{row}]={group_ids[row].item()}). Return a finite score for every sample."
        )
    _, group_of_row, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    order = torch.arange(len(scores), device=scores.device)
    for key in (ties, scores, group_of_row):
        if key is not None:
            order = order[torch.argsort(key[order], stable=True)]
    line = group_of_row[order]
    place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[line]
    width = int(counts.max()) if len(counts) else 0
    table = scores.new_zeros((len(counts), width), dtype=torch.float64)
    table[line, place] = scores[order].double()
    sizes = counts.unsqueeze(1)
    is_constant = table[:, :1] == table.gather(1, sizes - 1) if width else table.new_zeros((0, 1), dtype=torch.bool)
    return GroupTable(
        scores=table,
        is_filled=torch.arange(width, device=table.device) < sizes,
        sizes=sizes,
        is_constant=is_constant,
        row_of_place=order,
        line=line,
        place=place,
    )
