"""The directory of a run: what was asked, what it ran on, what came out, and where it can continue."""

import json
from pathlib import Path
from typing import Any

from hybridflow.checkpoint import Checkpoint, CheckpointStore
from hybridflow.config import Config, to_toml
from hybridflow.errors import CheckpointError
from hybridflow.observability import (
    ConsoleTracker,
    JsonlWriter,
    MultiTracker,
    TensorBoardTracker,
    collect_run_info,
    get_logger,
)
from hybridflow.runtime import write_text_atomically

logger = get_logger(__name__)


class RunDirectory:
    """`config.toml, run.json, metrics.jsonl, samples.jsonl, checkpoints/` of one run.

    `checkpoint` is where the run continues from, None where it starts. What was written after it is dropped, since
    it will be written again.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path = Path(config.trainer.run_dir)
        if config.trainer.resume == "never" and self.path.is_dir() and any(self.path.iterdir()):
            raise CheckpointError(
                f"'{self.path}' is not empty and trainer.resume='never'; choose another trainer.run_dir, or resume = 'auto'."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self.store = CheckpointStore(self.path / "checkpoints", keep=config.trainer.keep_checkpoints)
        self.checkpoint: Checkpoint | None = self.store.latest()
        self.step = self.checkpoint.step if self.checkpoint else 0
        self.metrics = JsonlWriter(self.path / "metrics.jsonl")
        self.samples = JsonlWriter(self.path / "samples.jsonl")
        for writer in (self.metrics, self.samples):
            writer.truncate_after(self.step if self.checkpoint else -1)
        write_text_atomically(self.path / "config.toml", to_toml(config))
        write_text_atomically(self.path / "run.json", json.dumps(collect_run_info(), indent=2, sort_keys=True) + "\n")
        if self.checkpoint:
            logger.info("continuing '%s' after step %d", self.path, self.step)

    def trackers(self, total_steps: int, figures: dict[str, str], title: str) -> tuple[MultiTracker, ConsoleTracker]:
        """All trackers of the run behind one, and the console, which also shows samples."""
        console = ConsoleTracker(total_steps, start_step=self.step, figures=figures, title=title)
        trackers: list[Any] = [self.metrics, console]
        if "tensorboard" in self.config.trainer.trackers:
            purge_step = self.step + 1 if self.checkpoint else None
            trackers.append(TensorBoardTracker(self.path / "tensorboard", purge_step=purge_step))
        return MultiTracker(trackers), console

    def last_metrics(self) -> dict[str, Any]:
        """The newest row of metrics.jsonl; empty where there is none."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1]) if lines else {}
