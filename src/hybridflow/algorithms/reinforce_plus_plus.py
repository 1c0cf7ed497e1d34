"""REINFORCE++: advantages without a critic, normalized over the whole batch instead of each group."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table
from hybridflow.algorithms.guards import require_columns, require_in_range, require_mask
from hybridflow.algorithms.masked import masked_whiten
from hybridflow.algorithms.returns import discounted_returns


@torch.no_grad()
def reinforce_plus_plus_advantages(
    *,
    token_level_rewards: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    gamma: float,
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return REINFORCE++ advantages and returns, both 0 where masked.

    https://arxiv.org/abs/2501.03262, section 3: the return of a token is the discounted sum of the rewards from it on
    (the score at the last token, minus the KL penalty of each), and advantages are returns shifted and scaled to mean 0
    and variance 1 over all tokens of the batch:

        R_t = r_t + gamma * R_{t+1}        A = (R - mean(R)) / std(R)

    Returns are not normalized.
    """
    function = "reinforce_plus_plus_advantages"
    require_columns(function, token_level_rewards=token_level_rewards)
    require_mask(function, "response_mask", response_mask, tuple(token_level_rewards.shape), "token_level_rewards")
    require_in_range(function, "gamma", gamma, minimum=0, maximum=1)
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    return masked_whiten(returns, response_mask), returns


@torch.no_grad()
def reinforce_plus_plus_baseline_advantages(
    *,
    scores: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch response_len"],
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return REINFORCE++-baseline advantages and returns, both 0 where masked.

    https://arxiv.org/abs/2501.03262, section 3 (the form with a baseline, for several responses to a prompt):

        R_i = r_i - mean(r of i's group)        A = (R - mean(R)) / std(R)

    with mean(R) and std(R) over all tokens of the batch. Returns are R. A constant group has R = 0. Raises for scores
    that are not finite.
    """
    function = "reinforce_plus_plus_baseline_advantages"
    require_mask(function, "response_mask", response_mask, (len(scores), response_mask.shape[-1]), "scores")
    table = group_table(function, scores, group_ids)
    returns = table.rows(table.deviations(table.mean()), like=scores)
    returns = torch.where(response_mask, returns, 0.0)
    return masked_whiten(returns, response_mask), returns
