"""The tracker of `trainer.trackers = ["wandb"]`: Weights & Biases, online or offline."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.runtime.observe.tracker import CleanNumbers, needing, sample_table, utf8_text

PROJECT = "hybridflow"


class WandbTracker:
    """A tracker that logs numbers and tables of samples to a W&B run; a run that goes on has the same `run_id`.

    W&B's own environment variables hold: `WANDB_MODE=offline` writes below `directory` for a later `wandb sync`,
    `WANDB_PROJECT` names the project. A step that is made again, after a resume, keeps its first values, which are the
    same. Raises ConfigError if the package is missing.
    """

    def __init__(self, directory: Path, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        with needing("wandb"):
            import wandb
        self._wandb: Any = wandb
        self._numbers = CleanNumbers(lambda name: utf8_text(f"metric{name}" if name[:1] in ("", "_") else name))
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=utf8_text(name),
            dir=directory,
            config=json.loads(utf8_text(json.dumps(dict(config), ensure_ascii=False, default=str))),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers of a step."""
        self._run.log(self._numbers(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log samples of a step as a table."""
        columns = sample_table(samples)
        table = self._wandb.Table(
            columns=list(columns),
            data=[list(row) for row in zip(*columns.values(), strict=True)],
            allow_mixed_types=True,  # the answer of one row is a number, that of another a text
        )
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        """End the W&B run, which uploads or writes what is pending."""
        self._run.finish()
