"""The stage that corrects for the policy that sampled a batch: a weight of each token, and metrics of the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms import rollout_correction
from hybridflow.config import AlgorithmConfig
from hybridflow.protocol import DataProto
from hybridflow.trainers.reading import Batch, read


def corrected_rollouts(batch: Batch, config: AlgorithmConfig) -> tuple[DataProto, Tensor]:
    """Return `rollout_weights`, the factor of each token's policy loss, and numbers for `correction_metrics`.

    The numbers, (3, tokens), are of each response token: the weight, whether it is bounded, whether it is rejected.
    """
    columns = read(batch, ("old_log_probs", "rollout_log_probs", "response_mask")).batch
    mask = columns["response_mask"]
    correction = rollout_correction(
        **columns,
        rollout_weights=config.rollout_weights,
        rollout_weight_bounds=config.rollout_weight_bounds,
        rollout_weight_outside=config.rollout_weight_outside,
        rollout_reject={str(name): bounds for name, bounds in config.rollout_reject.items()},
    )
    numbers = [correction.weights[mask], correction.bounded[mask], correction.rejected[mask]]
    return DataProto.from_dict({"rollout_weights": correction.weights}), torch.stack([x.double() for x in numbers])


def correction_metrics(parts: Sequence[Tensor]) -> dict[str, float]:
    """Return metrics of the rollout weights of a batch, from the numbers of its parts by `corrected_rollouts`."""
    weights, bounded, rejected = torch.cat(list(parts), dim=1)
    return {
        "rollout_correction/weight_mean": float(weights.mean()),
        "rollout_correction/weight_max": float(weights.max()),
        "rollout_correction/weight_min": float(weights.min()),
        "rollout_correction/bounded_share": float(bounded.mean()),
        "rollout_correction/rejected_share": float(rejected.mean()),
        "rollout_correction/effective_share": float(
            weights.sum().square() / (len(weights) * weights.square().sum()).clamp(min=1e-300)
        ),
    }
