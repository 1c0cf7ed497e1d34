"""Optimal token baseline: the baseline of each token that minimizes the variance of the gradient."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table
from hybridflow.algorithms.guards import require_columns, require_mask


@torch.no_grad()
def optimal_token_baseline_advantages(
    *,
    scores: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    old_log_probs: Float[Tensor, "batch response_len"],
    sum_squared_probs: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return advantages and returns, both 0 where masked.

    https://arxiv.org/abs/2602.07078, theorem 1 with the logit-gradient proxy. The squared norm of the gradient of
    log p(y_t) by the logits is w_t, and with r_i as the return of every token of response i:

        w_t = 1 - 2 p(y_t) + sum_v p(v)^2        W_it = sum_{j <= t} w_ij
        B_t = sum_i(W_it * r_i) / sum_i(W_it)    over the responses of the group that have a t-th token
        A_it = r_i - B_t

    A constant group has exactly 0; so has a token at a position that no other response of the group reaches. Raises for
    scores that are not finite.
    """
    function = "optimal_token_baseline_advantages"
    require_columns(function, old_log_probs=old_log_probs, sum_squared_probs=sum_squared_probs)
    require_mask(function, "response_mask", response_mask, tuple(old_log_probs.shape), like="old_log_probs")
    table = group_table(function, scores, group_ids)
    is_varied = table.rows((~table.is_constant).double().expand(table.scores.shape), like=scores.double()) > 0

    probability = torch.where(response_mask, old_log_probs, 0.0).double().exp()
    energy = 1 - 2 * probability + torch.where(response_mask, sum_squared_probs, 0.0).double()
    energies = torch.where(response_mask, energy, 0.0).cumsum(1)
    position = (response_mask.cumsum(1) - 1).clamp(min=0)  # position of a token among the unmasked tokens
    _, line = torch.unique(group_ids, return_inverse=True)
    cell = (line.unsqueeze(1) * max(response_mask.shape[1], 1) + position)[response_mask]
    token_scores = scores.double().unsqueeze(1).expand(response_mask.shape)[response_mask]
    weights = energies[response_mask]

    def summed(values: Tensor) -> Tensor:
        size = len(scores) * max(response_mask.shape[1], 1)
        return torch.zeros(size, dtype=torch.float64, device=values.device).index_add(0, cell, values)[cell]

    total, number = summed(weights), summed(torch.ones_like(weights))
    baseline = torch.where(
        total > 0, summed(weights * token_scores) / total.clamp(min=1e-300), summed(token_scores) / number
    )
    deviations = torch.where(number > 1, token_scores - baseline, 0.0)
    advantages = torch.zeros_like(old_log_probs)
    advantages[response_mask] = deviations.to(advantages.dtype)
    returns = torch.where(response_mask, scores.unsqueeze(1), 0.0).to(advantages.dtype)
    return torch.where(is_varied, advantages, 0.0), returns
