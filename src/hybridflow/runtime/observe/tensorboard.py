"""The tracker of `trainer.trackers = ["tensorboard"]`, which writes TensorBoard event files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.runtime.observe.tracker import CleanNumbers, needing, utf8_text


class TensorBoardTracker:
    """A tracker that writes numbers to event files in `directory`; text and None are left out.

    `purge_step` is the first step that a resumed run writes again: TensorBoard drops earlier events from there on.
    Raises ConfigError if the package is missing.
    """

    def __init__(self, directory: str | Path, purge_step: int | None = None) -> None:
        with needing("tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._numbers = CleanNumbers(utf8_text)
        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a step and flush the file."""
        for name, number in self._numbers(metrics).items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
