"""Standbys: processes that wait beside the ranks of a group, with their imports done, to replace lost ones.

They start faster than new processes by the time of the imports. They hold no model, no GPU and no reservation.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from hybridflow.controller.ray.launcher import Launcher
from hybridflow.controller.ray.liveness.heartbeat import delete_heartbeat
from hybridflow.controller.ray.processes import Launch, RayProcess
from hybridflow.controller.ray.transport import pickled_class
from hybridflow.runtime.observe import get_logger

logger = get_logger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""Seconds in which standbys must answer; otherwise new processes are started instead."""

IMPORT_TIMEOUT_S = 30.0
"""`ANSWER_TIMEOUT_S` of new standbys, which may still be importing: another process would take longer."""


class Standbys:
    """The standbys of the groups of a backend, one for each rank."""

    def __init__(self, launcher: Launcher, is_connected: Callable[[], bool]) -> None:
        self._launcher, self._is_connected = launcher, is_connected
        self._of: dict[Launch, list[RayProcess]] = {}
        self._imports: dict[Launch, list[Any]] = {}

    def provide(self, launch: Launch) -> None:
        """Start the standbys of a group, unless it has them; does not wait for them."""
        if launch in self._of:
            return
        self._of[launch] = self._launcher.start(launch, standby=True)
        classes = [pickled_class(cls_with_init.cls) for cls_with_init in launch.classes.values()]
        variables = launch.pool.environment
        self._imports[launch] = [standby.actor.warm.remote(classes, variables) for standby in self._of[launch]]

    def take(self, launch: Launch, lost: Sequence[RayProcess]) -> list[RayProcess]:
        """Return the standbys of a group, each on the node of its rank and with the GPUs of the lost process.

        If one is missing, does not answer, or is not where its rank is now, all are stopped and the result is empty.
        """
        standbys = self._of.get(launch)
        if standbys is None:
            return []
        homes = [process.home for process in lost]
        if [home and home.node_id for home in homes] != [place.node.node_id for place in launch.pool.places()]:
            self.stop(launch)
            return []
        refs = [p.actor.take_place.remote(h.address, h.gpu_ids) for p, h in zip(standbys, homes, strict=True) if h]
        _, importing = ray.wait(self._imports[launch], num_returns=len(refs), timeout=0)
        ray.wait(refs, num_returns=len(refs), timeout=IMPORT_TIMEOUT_S if importing else ANSWER_TIMEOUT_S)
        try:
            own_homes = ray.get(refs, timeout=0)
        except RayError:  # one has died, or does not answer
            logger.warning("a standby of %s is dead or does not answer, so new processes start", launch.label)
            self.stop(launch)
            return []
        for standby, home, before in zip(standbys, own_homes, homes, strict=True):
            standby.home = replace(home, gpu_ids=before.gpu_ids) if before else home
        logger.info("standbys take the places of %s", launch.label)
        del self._imports[launch]
        return self._of.pop(launch)

    def stop(self, launch: Launch) -> None:
        """Stop the standbys of a group, if it has any."""
        self._imports.pop(launch, None)
        for standby in self._of.pop(launch, []):
            standby.is_stopped = True
            if self._is_connected():
                ray.kill(standby.actor, no_restart=True)
                delete_heartbeat(standby)

    def close(self) -> None:
        """Stop all standbys."""
        for launch in list(self._of):
            self.stop(launch)
