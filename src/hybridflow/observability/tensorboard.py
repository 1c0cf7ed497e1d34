"""Metrics as TensorBoard event files, for `trainer.trackers = ["tensorboard"]`."""

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError


class TensorBoardTracker:
    """Writes numbers to event files in `directory`; text and None are left out.

    `purge_step` is the first step that a resumed run writes again: TensorBoard forgets what it saw from there on.
    Raises ConfigError if the package is missing.
    """

    def __init__(self, directory: str | Path, purge_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "trainer.trackers names 'tensorboard', but the package is missing; "
                "pip install 'hybridflow[tensorboard]', or take it out of trainer.trackers."
            ) from error
        self._writer: SummaryWriter | None = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._writer is None:
            raise ConfigError(f"step {step} was logged to a TensorBoard tracker that is closed.")
        for name, value in metrics.items():
            if isinstance(value, Real):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
