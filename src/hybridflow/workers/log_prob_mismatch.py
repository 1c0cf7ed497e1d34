"""Log-prob mismatch: how far the trainer's log-probs are from those that the rollout engine sampled with. On equal
weights it is rounding; other numerics, stale weights and a wrong sync show here first."""

import torch
from torch import Tensor

MISMATCH_BOUND = 0.1
"""A token whose log-probs differ by more counts in `rollout/log_prob_mismatch_share`."""

MEAN, LARGEST, KL, SHARE = (
    *("rollout/log_prob_mismatch", "rollout/log_prob_mismatch_max"),
    *("rollout/log_prob_kl", "rollout/log_prob_mismatch_share"),
)


def log_prob_mismatch_of(log_probs: Tensor, rollout_log_probs: Tensor) -> dict[str, Tensor]:
    """Return what is averaged over tokens, by the name of the metric; all (rows, response_len).

    The KL of the rollout's distribution to the trainer's is estimated by k3 (Schulman, 2020): the tokens are the
    rollout's.
    """
    difference = log_probs - rollout_log_probs
    size = difference.abs()
    return {
        MEAN: size,
        KL: torch.expm1(difference) - difference,
        SHARE: (size > MISMATCH_BOUND).to(size.dtype),
    }
