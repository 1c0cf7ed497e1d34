"""Profiles of chosen steps and ranks (`trainer.profile_steps`, `trainer.profile_ranks`).

RUN_DIR/profile/step_000012/<role>_<rank>.json.gz    written by the worker itself, on its node
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hybridflow.config import Config
from hybridflow.controller import Role, WorkerGroup
from hybridflow.observability import get_logger
from hybridflow.trainers.groups import groups_of_pools
from hybridflow.trainers.samples import Samples

logger = get_logger(__name__)


class Profiled(Protocol):
    """A trainer whose steps can be profiled."""

    config: Config
    groups: Mapping[Role, WorkerGroup]
    global_step: int

    def train_step(self) -> Samples:
        """Train on the next batch, count the step and replace `metrics`; return samples to log."""
        ...


def train_step(trainer: Profiled) -> Samples:
    """Make the trainer's next step, and write its profile if that is configured. Results do not depend on it."""
    how, step = trainer.config.trainer, trainer.global_step + 1
    if step not in how.profile_steps:
        return trainer.train_step()
    groups = groups_of_pools(trainer.config, trainer.groups, "begin_profile")
    for group in groups:
        group.begin_profile(how.profile_ranks)
    samples = trainer.train_step()
    directory = Path(how.run_dir, "profile", f"step_{step:06d}")
    for group in groups:
        group.end_profile(str(directory), group.name)
    logger.info("wrote the profile of step %d to '%s'", step, directory)
    return samples
