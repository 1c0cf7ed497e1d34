"""Waiting for calls until all have finished, one has failed, a process has died or stopped, or a deadline has passed.

Errors name the call and worker waited for, with a report of why it does not answer.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from hybridflow.controller.ray.liveness.hang_report import HangReports, report_calls, running_call
from hybridflow.controller.ray.liveness.heartbeat import Heartbeats
from hybridflow.controller.ray.liveness.silence import Silence
from hybridflow.controller.ray.liveness.watch import observe
from hybridflow.controller.ray.processes import RayCall, RayProcess, RayWorker
from hybridflow.controller.ray.transport import CallFailed, CallReply, thaw
from hybridflow.errors import LostWorkerError, WorkerDiedError, WorkerError, WorkerMemoryError, WorkerTimeoutError
from hybridflow.runtime.observe import Trace
from hybridflow.runtime.observe.trace import CONTROLLER

POLL_INTERVAL_S = 0.2
"""Seconds between checks of a wait for failed and overdue calls."""

DEATH_REPORT_DELAY_S = 1.0
"""Seconds by which Ray may report the death of a rank later than the failure of another rank that it caused."""

COLLECT_EVERY = 64
"""Number of calls to a process after which finished calls are collected, as some are never waited for."""

SEEN_LATER_S = 3.0
"""Seconds by which the last progress of ranks of a call may be seen at different times; they are reported together."""

LOOK_AFTER_S = 3.0
"""Seconds of a wait after which the heartbeats of the processes are read; most waits are shorter."""

SILENT_EXIT = "It exited without an error message; likely a signal, the OOM killer (check `dmesg`) or a native crash."

STORE_FULL = (OutOfDiskError, ObjectStoreFullError)
"""Ray's errors for an object that fits neither into shared memory nor on disk."""

DIED = (RayActorError, OutOfMemoryError)
"""Ray's errors for a process that has died; the second one if Ray killed it to free memory of its node."""

LOST = (ObjectLostError, NodeDiedError)
"""Ray's errors for an object or a node that is gone."""


class Waiting:
    """Waits for calls, reports their errors and records finished calls in `trace`.

    `processes`: the running processes. `stop`: a function that stops some of them. `require_cluster`: a function that
    raises an error if the cluster has died. `heartbeat_timeout_s`, `report_after_s`: as of `RayBackend`.
    """

    def __init__(
        self,
        processes: list[RayProcess],
        stop: Callable[[Sequence[RayProcess]], None],
        trace: Trace,
        require_cluster: Callable[[], None],
        heartbeat_timeout_s: float | None = None,
        report_after_s: float | None = None,
    ) -> None:
        self._processes, self._stop, self._trace, self._require_cluster = processes, stop, trace, require_cluster
        self._exit_errors: dict[str | None, WorkerError] = {}  # errors of lost processes, by Ray's actor id
        self._heartbeats = Heartbeats()
        self._silence = Silence(self._heartbeats, heartbeat_timeout_s)
        self._report_after_s = report_after_s

    def track(self, call: RayCall) -> None:
        """Register a call that was sent."""
        process = call.worker.process
        process.unfinished.append(call)
        if call.predecessor() is None and call.awaited() is None:
            call.running_since = time.monotonic()
        if len(process.unfinished) % COLLECT_EVERY == 0:  # some calls are never waited for
            self._collect_finished(process.unfinished)

    def collect_finished(self) -> None:
        """Collect calls that have finished without a wait; their errors are raised when they are waited for."""
        self._collect_finished([call for process in self._processes for call in process.unfinished])

    def _collect_finished(self, calls: Sequence[RayCall]) -> None:
        """Collect the finished ones among these calls, with one query to Ray."""
        of_ref = {call.done: call for call in calls if not call.is_finished}
        if not of_ref:
            return
        ready, _ = ray.wait(list(of_ref), num_returns=len(of_ref), timeout=0, fetch_local=False)
        for ref in ready:
            with contextlib.suppress(Exception):  # raised again when the result is read
                self._finish(of_ref[ref])

    def wait(self, calls: Sequence[RayCall]) -> None:
        """Wait until all calls have finished.

        Raises the error of the first call that fails, at once, and WorkerTimeoutError for a call over its deadline or a
        process without a heartbeat.
        """
        self._require_cluster()
        pending = {call.done: call for call in calls if not call.is_finished}
        if not pending:
            return
        with contextlib.suppress(RayError):  # failed and slow calls are handled one by one below
            for call, reply in zip(pending.values(), ray.get(list(pending), timeout=POLL_INTERVAL_S), strict=True):
                self._note_success(call, reply)
            return
        start, reports = time.monotonic(), HangReports(self._report_after_s)
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=POLL_INTERVAL_S, fetch_local=False)
            for ref in ready:
                self._finish(pending.pop(ref))
            if pending:
                self._check_progress(list(pending.values()), start, reports)

    def _finish(self, call: RayCall) -> None:
        """Mark a call as finished. Raises the error of the call."""
        try:
            self._note_success(call, ray.get(call.done))
            return
        except RayTaskError as error:
            failure = self.failure(call, error.cause, error)
        except RayError as error:
            failure = self.failure(call, error, error)
        call.forget_unfinished()
        raise failure  # outside the except block, to keep the cause of the error

    def _note_success(self, call: RayCall, frozen: Any) -> None:
        """Process the reply of a finished call. A small value is kept, which saves another request for it."""
        call.forget_unfinished()
        reply = thaw(frozen)
        if isinstance(reply, CallReply) and not call.is_finished:
            self._trace.record(reply.event._replace(sources=call.sources))
            call.duration.note(reply.event.start, reply.event.end)
            call.small_value = reply.value
        call.is_finished = True

    def failure(self, call: RayCall, cause: Any, error: Exception) -> BaseException:
        """Return the error to raise for a failed call."""
        if isinstance(cause, DIED):
            return self._death_error(call.worker, call.where, cause)
        if isinstance(cause, CallFailed):
            call.worker.process.has_failed = True
            return self._death_of_a_peer(call) or cause.error()
        if isinstance(cause, STORE_FULL):
            made = [producer for producer, _ in call.sources if producer != CONTROLLER] or [call.where]
            full = call.worker.error(
                WorkerError,
                f"{call.where} on worker {call.worker.name}: a result of {' or '.join(made)} fits neither into the "
                f"shared memory of its node nor on its disk ({type(cause).__name__}); use smaller batches, a larger "
                f"controller.object_store_bytes, or free disk space.",
            )
            full.__cause__ = cause  # from which the command line detects missing space
            return full
        kind = LostWorkerError if isinstance(cause, LOST) else WorkerError
        return call.worker.error(kind, f"{call.where} failed on worker {call.worker.name}: {error}")

    def _death_of_a_peer(self, call: RayCall) -> WorkerError | None:
        """Return the error for the death of another rank if it made this call fail, e.g. in a collective."""
        others = [c for peer in call.worker.process.peers for c in peer.unfinished[:1] if c is not call]
        if not others:
            return None
        ready, _ = ray.wait(
            [c.done for c in others], num_returns=len(others), timeout=DEATH_REPORT_DELAY_S, fetch_local=False
        )
        for other in others:
            if other.done in ready:
                try:
                    ray.get(other.done)
                except DIED as error:
                    return self._death_error(other.worker, other.where, error)
                except RayError:
                    continue  # it failed like this call; a wait for it reports its error
        return None

    def _check_progress(self, pending: list[RayCall], start: float, reports: HangReports) -> None:
        """Raise WorkerTimeoutError for calls over their deadline and silent processes; report a wait without progress.

        `start`: when the wait began.
        """
        self._require_cluster()
        self.collect_finished()
        now = time.monotonic()
        running = list(dict.fromkeys(map(running_call, pending)))
        for call in running:
            call.running_since = call.running_since or now
        may_be_overdue = any(call.timeout_s and call.running_s > call.timeout_s for call in running)
        if may_be_overdue or now - start > LOOK_AFTER_S:
            self._heartbeats.look([call.worker.process for call in running])
        overdue = [call for call in running if call.timeout_s and self._quiet_s(call) > call.timeout_s]
        if overdue:
            late = {peer for call in overdue for peer in call.worker.process.peers}
            overdue = [
                call
                for call in running
                if call in overdue
                or (call.worker.process in late and self._quiet_s(call) + SEEN_LATER_S > (call.timeout_s or math.inf))
            ]
            raise self._deadline_error(overdue, pending[0])
        if silent := self._silence.find([call for call in running if not call.is_finished]):
            self._stop_peers(*silent)
            raise silent[1]
        reports.check(pending, lambda call: min(self._quiet_s(call), now - start))

    def _quiet_s(self, call: RayCall) -> float:
        """Return the seconds since the start of a running call or the last progress of its process."""
        return min(call.running_s, self._heartbeats.idle_s(call.worker.process))

    # ------------------------------------------------------------------------------------------ deaths and deadlines

    def _death_error(self, worker: RayWorker, where: str, error: RayActorError | OutOfMemoryError) -> WorkerError:
        """Return the error for a process that has died; stop its peers, which may wait for it in a collective."""
        own_id = worker.process.actor._actor_id.hex()
        actor_id = error.actor_id if isinstance(error, RayActorError) else own_id
        if actor_id in self._exit_errors:
            return self._exit_errors[actor_id]
        process = next((each for each in self._processes if each.actor._actor_id.hex() == actor_id), None)
        if process is None and actor_id not in (None, own_id):
            return worker.error(
                WorkerError,
                f"{where} on worker {worker.name} reads a result of a group that was shut down before the result was "
                f"sent; shut a group down after its results are used.",
            )
        process = process or worker.process
        if process.exit_error is not None:
            return process.exit_error
        if process.is_stopped:
            text = f"worker {process.label} was shut down before the result of {where} was read."
            return worker.error(WorkerError, text)
        report = f"\nReport of the process:\n{observe(process.home)}" if process.home else ""
        kind = WorkerMemoryError if isinstance(error, OutOfMemoryError) else WorkerDiedError
        text = f"worker {process.place} died before {where} finished: {_exit_reason(error)}{report}"
        died = process.error(kind, text)
        self._stop_peers(process, died)
        return died

    def _stop_peers(self, process: RayProcess, error: WorkerError) -> None:
        """Stop all ranks of the process's group, with this error as the reason."""
        for peer in process.peers:
            peer.exit_error = self._exit_errors[peer.actor._actor_id.hex()] = error
        self._stop(process.peers)

    def _deadline_error(self, overdue: list[RayCall], awaited: RayCall) -> WorkerTimeoutError:
        """Return the error for calls over their deadline, with reports of their processes; stop these processes."""
        first = overdue[0]
        ranks = ", ".join(str(call.worker.rank) for call in overdue)
        lines = [
            f"{first.where} on {first.worker.role}, rank {ranks}, has been running for {first.running_s:.1f} s, "
            f"{self._quiet_s(first):.1f} s of them without progress, longer than its deadline of {first.timeout_s:g} s "
            f"(controller.call_timeout_s)."
        ]
        if awaited is not first:
            lines.append(
                f"The controller waits for {awaited.where} on {awaited.worker.name}, which waits for this call."
            )
        timed_out = first.worker.error(WorkerTimeoutError, "\n".join([*lines, report_calls(overdue)]))
        for call in overdue:
            self._stop_peers(call.worker.process, timed_out)
        return timed_out


def _exit_reason(error: RayActorError | OutOfMemoryError) -> str:
    """Return Ray's reason for the end of a process, without its advice."""
    if isinstance(error, OutOfMemoryError):
        return " ".join(str(error).partition("Object store memory usage")[0].split())
    text = str(error).partition("The actor is dead because")[2] or str(error)
    text = " ".join(text.partition("Some common causes")[0].split()).removeprefix("its worker process has died. ")
    if "connection error code 2" in text:  # Ray only knows that the connection was closed
        text += f" {SILENT_EXIT}"
    return text or type(error).__name__
