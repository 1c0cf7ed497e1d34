"""The sum of the losses and metrics of an update's micro-batches, which stay on the device until all are computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.observability.metrics import find_metric


@dataclass(frozen=True)
class LossShare:
    """A micro-batch's share of the loss, and its metrics: tensors of one number each, or Python numbers."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float]


def add_up(shares: Sequence[LossShare]) -> tuple[float, dict[str, float]]:
    """Return loss and metrics of the whole mini-batch, read from the device in one transfer.

    Metrics are summed; those whose reduction is "max" are combined by their maximum.
    """
    numbers = iter(read_numbers([value for share in shares for value in (share.loss, *share.metrics.values())]))
    loss, metrics = 0.0, {}
    for share in shares:
        loss += next(numbers)
        for name in share.metrics:
            metrics[name] = _join(name, metrics.get(name, 0.0), next(numbers))
    return loss, metrics


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return the values as Python numbers; the host waits for the device once."""
    unread = [value.detach().double().reshape(()) for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(unread).tolist() if unread else ())
    return [next(read) if isinstance(value, Tensor) else value for value in values]


def _join(name: str, one: float, other: float) -> float:
    metric = find_metric(name)
    return max(one, other) if metric and metric.reduction == "max" else one + other
