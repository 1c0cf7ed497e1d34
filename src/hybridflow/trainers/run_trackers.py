"""The trackers of `trainer.trackers`: those that are included, and a class of the user."""

import hashlib
from typing import Any

from hybridflow.config import leaf_keys
from hybridflow.errors import ConfigError
from hybridflow.observability import TensorBoardTracker, Tracker, get_logger
from hybridflow.observability.guarded_tracker import GuardedTracker
from hybridflow.observability.mlflow import MLflowTracker
from hybridflow.observability.prometheus import PrometheusTracker
from hybridflow.observability.weights_and_biases import WandbTracker
from hybridflow.runtime import load_user_function
from hybridflow.trainers.run_directory import RunDirectory

logger = get_logger(__name__)


def run_trackers(run: RunDirectory) -> list[GuardedTracker]:
    """Return the trackers of a run that has begun. Raises ConfigError for one that cannot be made."""
    trackers: list[GuardedTracker] = []
    try:
        for name in run.config.trainer.trackers:
            trackers.append(GuardedTracker(name, _tracker(name, run)))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def _tracker(name: str, run: RunDirectory) -> Tracker:
    config = leaf_keys(run.config)
    match name:
        case "tensorboard":
            return TensorBoardTracker(run.path / "tensorboard", purge_step=run.step + bool(run.checkpoint))
        case "wandb":
            return WandbTracker(run.path, _run_id(run), run.path.name, config)
        case "mlflow":
            return MLflowTracker(run.path, _run_id(run), run.path.name, config)
        case "prometheus":
            tracker = PrometheusTracker(run.config.trainer.prometheus_port, run.path.name)
            logger.info("metrics for Prometheus: %s", tracker.address)
            return tracker
    return _own_tracker(name, run, config)


def _own_tracker(name: str, run: RunDirectory, config: dict[str, Any]) -> Tracker:
    """Return a tracker of the user's class, which is called with `run_dir` and `config`."""
    build = load_user_function(name, "tracker", ConfigError)
    try:
        tracker = build(run_dir=run.path, config=config)
    except Exception as error:  # of the user's class
        raise ConfigError(
            f"trainer.trackers: {name}(run_dir=..., config=...) failed: {type(error).__name__}: {error}."
        ) from error
    if missing := [method for method in ("log", "close") if not callable(getattr(tracker, method, None))]:
        raise ConfigError(
            f"trainer.trackers: the tracker of {name} has no method {missing[0]}(); it needs log(step, metrics) and "
            "close(), and may have log_samples(step, samples)."
        )
    return tracker


def _run_id(run: RunDirectory) -> str:
    """Return an id that a run keeps when it goes on, and that a new run in the same directory does not get."""
    first = [start["started_at"] for start in run.starts() if not start.get("after_step")][-1:]
    return hashlib.blake2b(f"{run.path.absolute()} {first}".encode(errors="surrogatepass"), digest_size=8).hexdigest()
