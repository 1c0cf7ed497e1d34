"""Offload of weights and optimizer state to host memory between the calls of an idle role."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")


class Offload:
    """A re-entrant context, `with offload():`, that keeps weights and optimizer state on `device`, else on the host.

    `parameters` are the trained ones, inside or outside the model; `optimizer_state` has tensors by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[Tensor],
        optimizer_state: Mapping[Any, dict[str, Any]],
        device: torch.device,
    ) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        self._model, self._optimizer_state, self._device = model, optimizer_state, device
        self._masters = [parameter for parameter in parameters if id(parameter) not in own]
        self._depth = 0
        self.move_to(HOST)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Move weights and optimizer state to the device, and back to the host at the end."""
        if self._depth == 0:
            self.move_to(self._device)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.move_to(HOST)

    def move_to(self, device: torch.device) -> None:
        """Move weights and optimizer state; parameters stay the same objects."""
        self._model.to(device)
        for parameter in self._masters:
            parameter.data = parameter.data.to(device)
        for moments in self._optimizer_state.values():
            for name, value in moments.items():
                if isinstance(value, Tensor):  # step counts too
                    moments[name] = value.to(device)
        if self._device.type == "cuda" and device.type == "cpu":
            torch.cuda.empty_cache()
