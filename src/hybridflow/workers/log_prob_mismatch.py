"""Log-prob mismatch: the difference between the log-probs of the trainer and of the rollout engine.

With equal weights it is rounding; different numerics, stale weights and a wrong weight sync increase it.
"""

from torch import Tensor

from hybridflow.algorithms.kl import kl_k3
from hybridflow.errors import RolloutError
from hybridflow.protocol import DataProto

MISMATCH_BOUND = 0.1
"""Absolute log-prob difference above which a token counts in the metric SHARE."""

MEAN, LARGEST, KL, SHARE = (
    *("rollout/log_prob_mismatch", "rollout/log_prob_mismatch_max"),
    *("rollout/log_prob_kl", "rollout/log_prob_mismatch_share"),
)


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


def require_exact(rows: DataProto, log_probs: Tensor) -> None:
    """Raise RolloutError if the log-prob (rows, response_len) of a sampled token is not that of the rollout engine."""
    sampled, mask = rows.batch["rollout_log_probs"], rows.batch["response_mask"].bool()
    different = mask & (log_probs != sampled)
    if not different.any():
        return
    row, token = different.nonzero()[0].tolist()
    raise RolloutError(
        f"rollout.exact=true: {int(different.sum())} of {int(mask.sum())} sampled tokens have another log-prob in "
        f"training, the first in row {row}, token {token}: {float(log_probs[row, token]):.9g}, sampled with "
        f"{float(sampled[row, token]):.9g}. Weights or arithmetic of the two differ, which is a fault: please report "
        "it with the output of `hybridflow doctor`. rollout.exact=false goes on without this check."
    )
