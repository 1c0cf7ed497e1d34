"""Returns: the discounted sum of rewards from a token to the end of its response."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def discounted_returns(
    rewards: Float[Tensor, "batch response_len"], mask: Bool[Tensor, "batch response_len"], gamma: float
) -> Float[Tensor, "batch response_len"]:
    """Return R_t = r_t + gamma * R_{t+1}, 0 where masked; t + 1 is the next token *of the mask* (`gae_advantages`)."""
    returns = torch.zeros_like(rewards)
    following = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        is_step = mask[:, t]
        following = torch.where(is_step, rewards[:, t] + gamma * following, following)
        returns[:, t] = torch.where(is_step, following, 0.0)
    return returns
