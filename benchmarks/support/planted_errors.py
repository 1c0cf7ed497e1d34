"""Errors that a comparison of two GRPO implementations must notice, each planted in the configuration or the rows."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class PlantedError:
    """Overrides of the configuration, and a function that changes the rows."""

    name: str
    overrides: tuple[str, ...] = ()
    change: Callable[[Inputs], Inputs] = dict


def _negate_advantages(inputs: Inputs) -> Inputs:
    return {**inputs, "advantages": -inputs["advantages"]}


def _shift_mask(inputs: Inputs) -> Inputs:
    """Shift the mask of the second response, which is shorter than the longest, by one token."""
    mask = inputs["completion_mask"].clone()
    mask[1] = mask[1].roll(1)
    return {**inputs, "completion_mask": mask}


def _swap_advantages(inputs: Inputs) -> Inputs:
    advantages = inputs["advantages"].clone()
    advantages[[0, 1]] = advantages[[1, 0]]
    return {**inputs, "advantages": advantages}


PLANTED_ERRORS = (
    PlantedError("advantages negated", change=_negate_advantages),
    PlantedError("advantages of two rows swapped", change=_swap_advantages),
    PlantedError("mask of one row shifted by one", change=_shift_mask),
    *(
        PlantedError(f"aggregation {mode}", (f"actor.loss_aggregation={mode}",))
        for mode in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    ),
    PlantedError(
        "no clipping",
        ("actor.clip_ratio_low=1", "actor.clip_ratio_high=1e9", "actor.clip_ratio_dual=none"),
    ),
    PlantedError("no upper clipping", ("actor.clip_ratio_high=1e9",)),
    PlantedError("no lower clipping", ("actor.clip_ratio_low=1",)),
    PlantedError("no dual clip", ("actor.clip_ratio_dual=none",)),
    PlantedError("on-policy: ratio 1", ("actor.epochs=1",)),
    PlantedError("no KL", ("algorithm.kl_in_loss=false",)),
    PlantedError("KL by k2", ("algorithm.kl_estimator=k2",)),
    PlantedError("no temperature", ("rollout.temperature=1.0",)),
    PlantedError("learning rate times 100", ("actor.optimizer.lr=1e-1",)),
    PlantedError("learning rate times 1.5", ("actor.optimizer.lr=1.5e-3",)),
    PlantedError("no weight decay", ("actor.optimizer.weight_decay=0",)),
    PlantedError("no clipping of gradients", ("actor.optimizer.clip_grad_norm=1e9",)),
    PlantedError("beta1 of 0.8", ("actor.optimizer.betas=[0.8, 0.999]",)),
    PlantedError("beta2 of 0.9", ("actor.optimizer.betas=[0.9, 0.9]",)),
    PlantedError("epsilon of 1e-8", ("actor.optimizer.epsilon=1e-8",)),
)
