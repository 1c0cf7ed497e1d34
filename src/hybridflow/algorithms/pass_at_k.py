"""Pass@k advantages, which raise the probability that at least one of k responses is right."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hybridflow.algorithms.groups import group_table
from hybridflow.algorithms.guards import require_count, require_in_range
from hybridflow.errors import AlgorithmConfigError


@torch.no_grad()
def pass_at_k_advantages(
    *,
    scores: Float[Tensor, " batch"],
    group_ids: Int[Tensor, " batch"],
    k: int = 4,
    success_score: float = 1.0,
) -> tuple[Float[Tensor, "batch 1"], Float[Tensor, "batch 1"]]:
    """Return advantages and returns (equal here), one for each row.

    https://arxiv.org/abs/2508.10751, section 2.4, equations 10 to 14 (analytical derivation). A response passes if its
    score is at least `success_score`. P of a group's N responses pass and F fail; over all subsets of k, where a subset
    passes if one of its responses does:

        R       = 1 - C(F, k) / C(N, k)                            mean of the subsets' rewards
        sigma   = sqrt(R * (1 - R))                                 their standard deviation
        A_pass  = (1 - R) / sigma
        A_fail  = (1 - R - C(F - 1, k - 1) / C(N - 1, k - 1)) / sigma

    A response's advantage is the mean over the subsets that contain it. Advantages add up to 0 in each group. If all
    subsets pass, or none, they are 0. Raises for a group of fewer than k rows, and for scores that are not finite.
    """
    require_count("pass_at_k_advantages", "k", k, minimum=1)
    require_in_range("pass_at_k_advantages", "success_score", success_score, minimum=-math.inf)
    table = group_table("pass_at_k_advantages", scores, group_ids)
    sizes = table.sizes[:, 0].tolist()
    if sizes and min(sizes) < k:
        raise AlgorithmConfigError(
            f"pass_at_k_advantages: k={k}, but a group has {min(sizes)} rows; sample at least k responses to a prompt."
        )
    passes = table.is_filled & (table.scores >= success_score)
    pairs = [
        _advantages_of_group(size, int(passed), k) for size, passed in zip(sizes, passes.sum(1).tolist(), strict=True)
    ]
    pass_advantage, fail_advantage = table.scores.new_tensor(pairs).view(-1, 2).unsqueeze(2).unbind(1)
    advantages = table.rows(torch.where(passes, pass_advantage, fail_advantage), like=scores)
    return advantages, advantages.clone()


def _advantages_of_group(size: int, num_passed: int, k: int) -> tuple[float, float]:
    num_failed = size - num_passed
    none_passes = math.comb(num_failed, k) / math.comb(size, k)
    sigma = math.sqrt(none_passes * (1 - none_passes))
    if sigma == 0:
        return 0.0, 0.0
    others_fail = math.comb(num_failed - 1, k - 1) / math.comb(size - 1, k - 1)
    return none_passes / sigma, (none_passes - others_fail) / sigma
