"""Finds a process that is stopped or unreachable: it has no heartbeat while a call on it is awaited."""

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from hybridflow.controller.ray.liveness.heartbeat import Heartbeats
from hybridflow.controller.ray.liveness.watch import examine
from hybridflow.controller.ray.processes import RayCall, RayProcess
from hybridflow.errors import WorkerTimeoutError

PATIENCE_FACTOR = 10
"""A process that is seen to run or to sleep may be silent this many times as long: it may hold the interpreter lock."""

logger = logging.getLogger(__name__)


class Silence:
    """Decides which silent processes are lost. `timeout_s`: seconds without a heartbeat; None: none is lost."""

    def __init__(self, heartbeats: Heartbeats, timeout_s: float | None) -> None:
        self._heartbeats, self._timeout_s = heartbeats, timeout_s
        self._examine_at_s: WeakKeyDictionary[RayProcess, float] = WeakKeyDictionary()

    def find(self, running: Sequence[RayCall]) -> tuple[RayProcess, WorkerTimeoutError] | None:
        """Return the first process of these calls that is lost, and the error for it."""
        for call in running:
            process, timeout_s = call.worker.process, self._timeout_s
            silent_s = self._heartbeats.silent_s(process)
            if timeout_s is None or silent_s < timeout_s:
                self._examine_at_s.pop(process, None)
            elif silent_s >= self._examine_at_s.get(process, timeout_s):
                self._examine_at_s[process] = silent_s + timeout_s
                if error := self._examine(call, silent_s, timeout_s):
                    return process, error
        return None

    def _examine(self, call: RayCall, silent_s: float, timeout_s: float) -> WorkerTimeoutError | None:
        """Look at a silent process from outside; return the error if it is lost."""
        process = call.worker.process
        state, report = examine(process.home)
        self._heartbeats.look([process], again=True)
        if self._heartbeats.silent_s(process) < silent_s:
            return None  # it goes on
        lost_after_s = timeout_s * (PATIENCE_FACTOR if state in ("running", "blocked") else 1)
        text = (
            f"worker {process.place} {_MEANING.get(state, 'is unreachable')}: it has not sent a heartbeat for "
            f"{silent_s:.0f} s, while {call.where} runs on it"
        )
        if silent_s < lost_after_s:
            logger.warning("%s; it counts as lost after %g s.\n%s", text, lost_after_s, report)
            return None
        text += f" (limit: {lost_after_s:g} s, controller.heartbeat_timeout_s={timeout_s:g})."
        return process.error(WorkerTimeoutError, f"{text}\nReport of the process:\n{report}")


_MEANING = {
    "stopped": "is stopped by a signal (T)",
    "zombie": "has exited (Z)",
    "dead": "has exited",
    "running": "is starved, or holds its interpreter lock in C code",
    "blocked": "sleeps, and cannot run its threads",
}
"""The meaning of a silent process's state."""
