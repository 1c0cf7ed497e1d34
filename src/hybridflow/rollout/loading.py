"""New weights on their way into an engine: which were announced, and which have come."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hybridflow.errors import RolloutError


class Loading:
    """Counts off the weights of one version. Raises RolloutError unless all that are wanted are announced and fit."""

    def __init__(self, wanted: Mapping[str, torch.Size], announced: Mapping[str, torch.Size]) -> None:
        if unknown := sorted(set(announced) - set(wanted)):
            raise RolloutError(f"the rollout model has no weights called {', '.join(unknown[:5])}.")
        if missing := sorted(set(wanted) - set(announced)):
            raise RolloutError(f"weights are missing: {', '.join(missing[:5])}; every parameter must be given.")
        for name, shape in announced.items():
            if wanted[name] != shape:
                raise RolloutError(
                    f"weight '{name}' has shape {tuple(shape)}, in the rollout model {tuple(wanted[name])}."
                )
        self._shapes, self._to_come = dict(announced), set(announced)

    def counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights as they come. Raises RolloutError for one that was not announced like this, or came before."""
        for name, tensor in weights:
            if name not in self._to_come:
                raise RolloutError(
                    f"weight '{name}' came twice." if name in self._shapes else f"weight '{name}' was not announced."
                )
            if tensor.shape != self._shapes[name]:
                raise RolloutError(
                    f"weight '{name}' came with shape {tuple(tensor.shape)}, announced was {tuple(self._shapes[name])}."
                )
            if not tensor.is_floating_point():
                raise RolloutError(f"weight '{name}' came as {tensor.dtype}; weights are floating-point numbers.")
            self._to_come.remove(name)
            yield name, tensor

    def require_complete(self) -> None:
        """Raises RolloutError if something that was announced has not come."""
        if self._to_come:
            raise RolloutError(f"weights did not come: {', '.join(sorted(self._to_come)[:5])}.")


def announced(loading: Loading | None) -> Loading:
    """Raises RolloutError where no weights are on their way."""
    if loading is None:
        raise RolloutError("no weights are announced: call start_loading first.")
    return loading
