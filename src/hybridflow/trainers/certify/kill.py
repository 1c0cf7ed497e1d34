"""A fault in a run of a certificate: in a backward pass of a step, a worker is killed, or waits for its driver's end.

DIRECTORY/hook.py   what HYBRIDFLOW_FAULTS names
DIRECTORY/step      the step of the run, which the driver writes and the workers read
DIRECTORY/reached   exists once the worker has come to its place; the fault happens once, also after a restart
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridflow.runtime.fault_points import FAULTS_VARIABLE
from hybridflow.runtime.files import write_text_atomically

PLACE = "backward"
WORKER = "actor_rollout/0"
WAIT_S = 600.0
"""Seconds that a worker waits for the end of its driver."""


@dataclass(frozen=True)
class Kill:
    """The kill of WORKER, or of the driver while it waits for this worker, in a backward pass of `step`."""

    directory: str
    whom: Literal["worker", "driver"]
    step: int

    def environment(self) -> dict[str, str]:
        """Write the hook, and return the variables with which a run has this fault."""
        directory = Path(self.directory)
        directory.mkdir(parents=True)
        hook = directory / "hook.py"
        hook.write_text(f"from {__name__} import Kill\ninject = {self!r}.inject\n", encoding="utf-8")
        return {FAULTS_VARIABLE: f"{hook}:inject"}

    @property
    def reached(self) -> Path:
        """The file that exists once the worker is at the place of the fault."""
        return Path(self.directory) / "reached"

    def inject(self, place: str, worker: str, target: Any) -> None:
        """Do what the fault says, at the first call for its worker and place in its step."""
        file = Path(self.directory) / "step"
        if place == "step":
            write_text_atomically(file, str(target))
        elif (place, worker) == (PLACE, WORKER) and file.exists() and int(file.read_text()) == self.step:
            try:
                self.reached.touch(exist_ok=False)
            except FileExistsError:
                return
            if self.whom == "worker":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(WAIT_S)
