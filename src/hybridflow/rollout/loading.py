"""The loading of new weights into an engine: checks of the announced and the received ones."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import RolloutEngine


class Loading:
    """The weights of one version while they are loaded.

    Raises RolloutError unless all `wanted` parameters are announced with their shapes.
    """

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
        self._shapes, self._missing = dict(announced), set(announced)

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; raise RolloutError for one that was not announced with its shape, or is repeated."""
        for name, tensor in weights:
            if name not in self._missing:
                raise RolloutError(
                    f"weight '{name}' came twice." if name in self._shapes else f"weight '{name}' was not announced."
                )
            if tensor.shape != self._shapes[name]:
                raise RolloutError(
                    f"weight '{name}' has shape {tuple(tensor.shape)}, but {tuple(self._shapes[name])} was announced."
                )
            if not tensor.is_floating_point():
                raise RolloutError(f"weight '{name}' has dtype {tensor.dtype}; expected a floating-point dtype.")
            self._missing.remove(name)
            yield name, tensor

    def require_complete(self) -> None:
        """Raise RolloutError if an announced weight is missing."""
        if self._missing:
            raise RolloutError(f"weights did not come: {', '.join(sorted(self._missing)[:5])}.")


def require_announced(loading: Loading | None) -> Loading:
    """Return the loading in progress; raise RolloutError if there is none."""
    if loading is None:
        raise RolloutError("no weights are announced: call start_loading first.")
    return loading


def load_weights(engine: RolloutEngine, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Load all weights at once.

    Raises RolloutError, with nothing loaded, unless every parameter is given once with its shape.
    """
    given: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name in given:
            raise RolloutError(f"weight '{name}' came twice.")
        given[name] = tensor
    engine.start_loading({name: tensor.shape for name, tensor in given.items()})
    engine.load(given.items())
    engine.finish_loading(version)
