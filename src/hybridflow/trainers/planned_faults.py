"""The faults that a run injects into itself (`faults.plan`, `faults.random`): planned before its workers start."""

from collections.abc import Iterable

from hybridflow.config import Config
from hybridflow.config.faults import planned_faults
from hybridflow.controller import Role
from hybridflow.observability import get_logger
from hybridflow.runtime.drawn_faults import draw_faults
from hybridflow.runtime.fault_points import arm_faults, plan_faults, unfired_faults
from hybridflow.trainers.run_directory import RunDirectory

logger = get_logger(__name__)


def prepare_faults(config: Config, run: RunDirectory, roles: Iterable[Role], total_steps: int) -> None:
    """Write the faults of the run into its directory and arm those of this process; log them.

    Raises ConfigError for a fault that cannot fire in a run with these roles and steps, and RunInUseError.
    """
    if not config.faults.is_empty:
        names = [role.value for role in roles]
        planned = planned_faults(config, names, total_steps)  # pyright: ignore[reportArgumentType]
        drawn = draw_faults(config, names, total_steps)  # pyright: ignore[reportArgumentType]
        with run.locked():
            plan_faults(run.path, [*planned, *drawn], run.step + 1)
        arm_faults(config)
        unfired = unfired_faults()
        logger.warning("faults that this run injects into itself: %s", "; ".join(unfired) or "none, all fired before")
        return
    arm_faults(config)


def warn_of_unfired_faults() -> None:
    """Log the faults that did not fire in a finished run."""
    if unfired := unfired_faults():
        logger.warning(
            "faults that did not fire, because their workers did not pass their phases from these steps on: %s",
            "; ".join(unfired),
        )
