"""A training run as a checkpoint: the state of its groups, its position in the data, random state, and what more."""

from collections.abc import Iterable
from typing import Any

from hybridflow.checkpoint import Checkpoint, save_state
from hybridflow.controller import WorkerGroup
from hybridflow.data import BatchLoader
from hybridflow.observability import get_logger
from hybridflow.runtime import capture_random_state, restore_random_state
from hybridflow.trainers.run_directory import RunDirectory

logger = get_logger(__name__)

CONTROLLER = "controller"
"""Component of a checkpoint that the controller writes; each group writes its own."""


def save_training(
    run: RunDirectory, step: int, groups: Iterable[WorkerGroup], loader: BatchLoader, **more: Any
) -> None:
    """Write the checkpoint of a step: complete, or not there. Raises CheckpointError."""
    with run.store.begin(step, info=run.identity) as directory:
        for group in groups:
            group.save(str(directory))
        state = {"global_step": step, "loader": loader.state_dict(), "random": capture_random_state(), **more}
        save_state(state, directory / CONTROLLER)
    logger.debug("saved '%s'", run.store.path(step))


def restore_training(checkpoint: Checkpoint, groups: Iterable[WorkerGroup], loader: BatchLoader) -> dict[str, Any]:
    """Put groups, loader and random state where a checkpoint has them; returns the controller's state.

    Raises CheckpointError for weights that do not fit, DataError for other data.
    """
    state = checkpoint.load(CONTROLLER)
    loader.load_state_dict(state["loader"])
    for group in groups:
        group.load(str(checkpoint.directory))
    restore_random_state(state["random"])
    return state
