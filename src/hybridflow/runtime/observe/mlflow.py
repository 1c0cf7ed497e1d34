"""The tracker of `trainer.trackers = ["mlflow"]`: an MLflow server, or a database in the run's directory."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.runtime.observe.tracker import CleanNumbers, needing, sample_table, utf8_text

EXPERIMENT = "hybridflow"
KEY = "hybridflow.run"
"""The tag by which a run that goes on finds its MLflow run."""

MAX_CHARS = 500
"""Characters of a parameter that every MLflow server takes."""


MAX_NAME_CHARS = 240
"""Characters of a name, of the 250 that MLflow takes."""


def metric_name(name: str) -> str:
    """Return a name that MLflow takes, which is also a path: `val/pass_4` for `val/pass@4`, `a/b` for `/a/../b/`."""
    parts = [part.lstrip(".") for part in re.sub(r"[^A-Za-z0-9_\-. /:]", "_", name).split("/")]
    return "/".join(filter(None, parts))[:MAX_NAME_CHARS].rstrip("/") or "_"


class MLflowTracker:
    """A tracker that logs numbers, the configuration and tables of samples to an MLflow run, found by its `run_id`.

    MLflow's own environment variables hold: `MLFLOW_TRACKING_URI` (otherwise `mlflow.db` in `directory`),
    `MLFLOW_EXPERIMENT_NAME`. Raises ConfigError if the package is missing.
    """

    def __init__(self, directory: Path, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        with needing("mlflow"):
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        self._metric: Any = Metric
        self._numbers = CleanNumbers(metric_name)
        directory = directory.absolute()
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory}/mlflow.db"
        self._client: Any = MlflowClient(tracking_uri=address)
        artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else f"{directory.as_uri()}/mlflow"
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT), artifacts)
        found = self._client.search_runs([experiment], f"tags.`{KEY}` = '{run_id}'", max_results=1)
        self._run = (
            found[0] if found else self._client.create_run(experiment, tags={KEY: run_id}, run_name=utf8_text(name))
        )
        self._id: str = self._run.info.run_id
        known = self._run.data.params
        given = {metric_name(key): utf8_text(str(value)[:MAX_CHARS]) for key, value in config.items()}
        params = [Param(key, value) for key, value in given.items() if key not in known]
        for start in range(0, len(params), 100):  # the most that one call takes
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the numbers of a step."""
        now = int(time.time() * 1000)
        numbers = [self._metric(name, number, now, step) for name, number in self._numbers(metrics).items()]
        for start in range(0, len(numbers), 1000):  # the most that one call takes
            self._client.log_batch(self._id, metrics=numbers[start : start + 1000])

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log samples of a step as a table, `samples/step_N.json`."""
        data = sample_table(samples)
        self._client.log_table(self._id, data=data, artifact_file=f"samples/step_{step:06d}.json")

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        self._client.set_terminated(self._id)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts)
