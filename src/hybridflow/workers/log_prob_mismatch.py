"""Log-prob mismatch: the difference between the log-probs of the trainer and of the rollout engine.

With equal weights it is rounding; different numerics, stale weights and a wrong weight sync increase it.
"""

from torch import Tensor

from hybridflow.algorithms.kl import kl_k3

MISMATCH_BOUND = 0.1
"""Absolute log-prob difference above which a token counts in the metric SHARE."""

MEAN, LARGEST = "rollout/log_prob_mismatch", "rollout/log_prob_mismatch_max"
KL, SHARE = "rollout/log_prob_kl", "rollout/log_prob_mismatch_share"


def log_prob_mismatch_of(log_probs: Tensor, rollout_log_probs: Tensor) -> dict[str, Tensor]:
    """Return the values of each token by metric name, all (rows, response_len), to be averaged over tokens.

    The KL from the rollout's distribution to the trainer's is estimated by k3 (Schulman, 2020), as the tokens were
    sampled by the rollout engine.
    """
    difference = log_probs - rollout_log_probs
    size = difference.abs()
    return {
        MEAN: size,
        KL: kl_k3(rollout_log_probs, log_probs),
        SHARE: (size > MISMATCH_BOUND).to(size.dtype),
    }
