"""Generalized advantage estimation (GAE) from a critic's values and one reward per token."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_in_range, require_mask
from hybridflow.algorithms.masked import masked_whiten


@torch.no_grad()
def gae_advantages(
    *,
    token_level_rewards: Float[Tensor, "batch response_len"],
    values: Float[Tensor, "batch response_len"],
    response_mask: Bool[Tensor, "batch response_len"],
    gamma: float,
    lam: float,
    whiten_advantages: bool,
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return GAE advantages and returns, both 0 where masked.

    https://arxiv.org/abs/1506.02438, equation 16 as a recursion, with value 0 after the last token:

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    Only tokens of the mask are steps: t+1 is the next token *of the mask*, so that padding after a response, and
    tokens in it that the policy did not write, add no reward, value or factor of gamma. Returns use the advantages
    before whitening. `whiten_advantages` shifts and scales the advantages to mean 0 and variance 1 over all tokens of
    the mask.
    """
    require_columns("gae_advantages", values=values, token_level_rewards=token_level_rewards)
    require_mask("gae_advantages", "response_mask", response_mask, tuple(values.shape), like="values")
    require_in_range("gae_advantages", "gamma", gamma, minimum=0, maximum=1)
    require_in_range("gae_advantages", "lam", lam, minimum=0, maximum=1)

    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        is_step = response_mask[:, t]
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(is_step, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(is_step, values[:, t], next_value)
        advantages[:, t] = torch.where(is_step, next_advantage, 0.0)
    returns = torch.where(response_mask, advantages + values, 0.0)
    if whiten_advantages:
        advantages = masked_whiten(advantages, response_mask)
    return advantages, returns
