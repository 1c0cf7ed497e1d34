"""An optimizer step whose gradients are added part by part: what the engine remembers until the last part."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from hybridflow.engines.base import LossFunction
from hybridflow.engines.loss_shares import LossShare
from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto


@dataclass(frozen=True)
class UpdatePart:
    """Rows of an optimizer step, and how their share of the loss is computed."""

    rows: DataProto
    loss_function: LossFunction
    with_entropy: bool = False
    temperature: float = 1.0


class StartedUpdate:
    """The parts whose gradients were added, in order; their weights stay on the device until `close`."""

    def __init__(self, on_device: AbstractContextManager[None]) -> None:
        self.parts: list[UpdatePart] = []
        self.shares: list[LossShare] = []
        self.counts = dict.fromkeys(("num_tokens", "num_computed_tokens", "num_padding_tokens"), 0)
        self._on_device = ExitStack()
        self._on_device.enter_context(on_device)

    def note(self, shares: Iterable[LossShare], counts: Mapping[str, int]) -> None:
        """Remember the shares of the loss of a part, and its numbers of tokens."""
        self.shares += shares
        self.counts = {name: count + counts[name] for name, count in self.counts.items()}

    def close(self) -> None:
        """Let the weights leave the device; gradients that no optimizer step used are lost."""
        self._on_device.close()


def require_next(number: int, started: StartedUpdate | None) -> StartedUpdate:
    """Return the started update if part `number` is the next one. Raises BatchError."""
    added = len(started.parts) if started else 0
    if started is None or number != added:
        raise BatchError(
            f"part {number} of an update cannot follow {added} added parts: a part failed or is missing, and the "
            "gradients of a failed update are dropped; begin again with part 0."
        )
    return started
