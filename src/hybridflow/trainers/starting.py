"""Starts the workers of a run, again if one dies or hangs meanwhile."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from hybridflow.config import Config
from hybridflow.errors import LostWorkerError
from hybridflow.runtime import seed_random_state
from hybridflow.runtime.observe import get_logger
from hybridflow.trainers.failures import Tries

logger = get_logger(__name__)

T = TypeVar("T")


def start_with_tries(config: Config, start: Callable[[], T], facts: dict[str, Any]) -> T:
    """Return the result of `start()`, which starts a cluster and workers and stops them if it raises.

    On Ray it is called again after the loss of a worker or of the cluster, at most `recovery.max_restarts` times.
    `facts["failed_starts"]` lists the errors.
    """
    recovery = config.recovery
    tries = Tries(recovery.max_restarts if config.controller.backend == "ray" else 0, recovery.backoff_s)
    while True:
        try:
            return start()
        except LostWorkerError as error:
            if tries.is_exhausted():
                raise
            pause_s = tries.next_pause_s(0)
            logger.warning("%s", error)
            logger.warning("starting the workers again, try %d of %d", tries.count, recovery.max_restarts)
            facts.setdefault("failed_starts", []).append(str(error).partition("\n")[0])
        time.sleep(pause_s)
        seed_random_state(config.trainer.seed)
