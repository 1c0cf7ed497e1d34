"""ReMax: the score of the greedy response is the baseline of the sampled ones."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hybridflow.algorithms.guards import require_columns, require_mask
from hybridflow.algorithms.returns import discounted_returns


@torch.no_grad()
def remax_advantages(
    *,
    token_level_rewards: Float[Tensor, "batch response_len"],
    baseline_scores: Float[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch response_len"],
) -> tuple[Float[Tensor, "batch response_len"], Float[Tensor, "batch response_len"]]:
    """Return ReMax advantages and returns, both 0 where masked.

    https://arxiv.org/abs/2310.10505, algorithm 1: with b the score of the policy's greedy response to the same prompt
    (`baseline_scores`),

        A_t = sum_{s >= t} r_s - b

    where r is the score at the last token, minus the KL penalty of each token if any. Returns are the sums.
    """
    require_columns("remax_advantages", token_level_rewards=token_level_rewards)
    require_columns("remax_advantages", "(batch)", baseline_scores=baseline_scores)
    shape = (len(baseline_scores), token_level_rewards.shape[1])
    require_mask("remax_advantages", "response_mask", response_mask, shape, like="token_level_rewards")
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return torch.where(response_mask, returns - baseline_scores.unsqueeze(1), 0.0), returns
