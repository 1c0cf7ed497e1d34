"""Tables of functions by configuration name, built from `declarations`.

An estimator takes columns and parameters as keyword-only arguments and returns (advantages, returns); a policy loss
takes them too and returns a `PolicyLoss`; a selection takes `covariances` and `seed` and returns the selected tokens.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from hybridflow.algorithms.declarations import ESTIMATORS, LOSSES
from hybridflow.algorithms.token_losses import PolicyLoss


def _load(path: str) -> Callable[..., Any]:
    file, _, name = path.partition(":")
    return getattr(import_module(f"hybridflow.algorithms.{file}"), name)


ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    name: _load(estimator.function) for name, estimator in ESTIMATORS.items()
}
"""Advantage estimators by configuration name (`algorithm.advantage`)."""
POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {name: _load(loss.function) for name, loss in LOSSES.items()}
"""Policy losses by configuration name (`actor.policy_loss`)."""
SELECTIONS: dict[str, Callable[..., Tensor]] = {
    name: _load(loss.selection) for name, loss in LOSSES.items() if loss.selection
}
"""Token selections by the configuration name of a policy loss that reads `selected_tokens`."""
