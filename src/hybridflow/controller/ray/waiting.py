"""Waiting for calls: until they have ended, one has failed, a process has died, or a deadline has passed.

Whoever waits learns who is waited for, and why that does not answer.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)

from hybridflow.controller.ray.processes import RayCall, RayProcess, RayWorker
from hybridflow.controller.ray.transport import CallFailed, Reply, thaw
from hybridflow.controller.ray.watch import observe
from hybridflow.errors import LostWorkerError, WorkerDiedError, WorkerError, WorkerTimeoutError
from hybridflow.observability import Trace
from hybridflow.observability.trace import CONTROLLER
from hybridflow.runtime.python_stacks import own_stacks

SLICE_S = 0.2
"""How often a wait looks whether somebody has failed or is overdue."""

DEATH_SHOWS_AFTER_S = 1.0
"""A rank that fails because another has died may be heard of before the death is."""

FORGET_EVERY = 64
"""Calls sent to a process after which those that have ended are looked for, though nobody may wait for them."""

MAX_REPORTS = 4
"""Workers that a report of an overdue call looks at."""

NO_LAST_WORD = (
    "It ended without a word: killed by a signal, by the kernel for want of memory (`dmesg` says so), or by a crash."
)

FULL = (OutOfDiskError, ObjectStoreFullError)

LOST = (ObjectLostError, NodeDiedError)
"""Errors of Ray for an object or a node that is gone."""


class Waiting:
    """`processes`: those that run. `stop` ends some. `trace` hears of every call that has ended."""

    def __init__(self, processes: list[RayProcess], stop: Callable[[Sequence[RayProcess]], None], trace: Trace) -> None:
        self._processes, self._stop, self._trace = processes, stop, trace
        self._fates: dict[str | None, WorkerError] = {}  # of processes that were lost, by Ray's id of the actor

    def track(self, call: RayCall) -> None:
        """A call has been sent."""
        process = call.worker.process
        if len(process.unfinished) < process.concurrent_calls and call.awaited() is None:
            call.running_since = time.monotonic()
        process.unfinished.append(call)
        if len(process.unfinished) % FORGET_EVERY == 0:  # calls may never be waited for
            self._note_ended(process.unfinished)

    def note_ended(self) -> None:
        """Take notice of calls that have ended though they were not waited for; errors are raised when they are."""
        self._note_ended([call for process in self._processes for call in process.unfinished])

    def _note_ended(self, calls: Sequence[RayCall]) -> None:
        """Ask Ray once for all of them."""
        of_ref = {call.done: call for call in calls if not call.is_finished}
        if not of_ref:
            return
        ready, _ = ray.wait(list(of_ref), num_returns=len(of_ref), timeout=0, fetch_local=False)
        for ref in ready:
            with contextlib.suppress(Exception):  # it is raised again when the result is read
                self._finish(of_ref[ref])

    def wait(self, calls: Sequence[RayCall]) -> None:
        """Wait until all have ended. Raises the error of the first that failed, at once, and WorkerTimeoutError for one
        that is over its deadline."""
        pending = {call.done: call for call in calls if not call.is_finished}
        if not pending:
            return
        with contextlib.suppress(RayError):  # what has failed, or takes longer, is looked at one by one
            for call, reply in zip(pending.values(), ray.get(list(pending), timeout=SLICE_S), strict=True):
                self._note_success(call, reply)
            return
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=SLICE_S, fetch_local=False)
            for ref in ready:
                self._finish(pending.pop(ref))
            if pending:
                self._check_deadlines(list(pending.values()))

    def _finish(self, call: RayCall) -> None:
        """Note that a call has ended. Raises what it raised."""
        try:
            self._note_success(call, ray.get(call.done))
            return
        except RayTaskError as error:
            failure = self.failure(call, error.cause, error)
        except RayError as error:
            failure = self.failure(call, error, error)
        call.forget_unfinished()
        raise failure  # out here, so that its cause is its own

    def _note_success(self, call: RayCall, frozen: Any) -> None:
        """Take the reply of a call that has ended. A small value is kept, so that nobody has to ask for it again."""
        call.forget_unfinished()
        reply = thaw(frozen)
        if isinstance(reply, Reply) and not call.is_finished:
            self._trace.record(reply.event._replace(sources=call.sources))
            call.duration.seconds = reply.event.end - reply.event.start
            call.small_value = reply.value
        call.is_finished = True

    def failure(self, call: RayCall, cause: Any, error: Exception) -> BaseException:
        """What to raise for the error of a call."""
        if isinstance(cause, RayActorError):
            return self._tell_death(call.worker, call.where, cause)
        if isinstance(cause, CallFailed):
            return self._death_of_a_peer(call) or cause.error()
        if isinstance(cause, FULL):
            made = [producer for producer, _ in call.sources if producer != CONTROLLER] or [call.where]
            full = _worker_error(
                f"{call.where} on worker {call.worker.name}: a result of {' or '.join(made)} fits neither into the "
                f"shared memory of its node nor on its disk ({type(cause).__name__}); use smaller batches, a larger "
                f"controller.object_store_bytes, or free disk space.",
                call.worker,
            )
            full.__cause__ = cause  # by which the command line knows that space was missing
            return full
        kind = LostWorkerError if isinstance(cause, LOST) else WorkerError
        return _worker_error(f"{call.where} failed on worker {call.worker.name}: {error}", call.worker, kind)

    def _death_of_a_peer(self, call: RayCall) -> WorkerError | None:
        """The death of another rank, if that is what made this one fail: in a collective, for one."""
        others = [c for peer in call.worker.process.peers for c in peer.unfinished[:1] if c is not call]
        if not others:
            return None
        ready, _ = ray.wait(
            [c.done for c in others], num_returns=len(others), timeout=DEATH_SHOWS_AFTER_S, fetch_local=False
        )
        for other in others:
            if other.done in ready:
                try:
                    ray.get(other.done)
                except RayActorError as error:
                    return self._tell_death(other.worker, other.where, error)
                except RayError:
                    continue  # it failed as this one did, and is told if somebody waits for it
        return None

    def _check_deadlines(self, pending: list[RayCall]) -> None:
        self.note_ended()
        now = time.monotonic()
        running = list(dict.fromkeys(_running(call) for call in pending))
        for call in running:
            call.running_since = call.running_since or now
        overdue = [call for call in running if call.timeout_s and now - (call.running_since or now) > call.timeout_s]
        if overdue:
            raise self._tell_overdue(overdue, pending[0], now)

    # ------------------------------------------------------------------------------------------ bad news

    def _tell_death(self, worker: RayWorker, where: str, error: RayActorError) -> WorkerError:
        """The error for a process that is gone; its peers, which may wait for it in a collective, are ended too."""
        if error.actor_id in self._fates:
            return self._fates[error.actor_id]
        process = self._process_of(error)
        if process is None and error.actor_id not in (None, worker.process.actor._actor_id.hex()):
            return _worker_error(
                f"{where} on worker {worker.name} reads a result of a group that was shut down before it was sent; "
                f"shut a group down after its results were used.",
                worker,
            )
        process = process or worker.process
        if process.fate is not None:
            return process.fate
        if process.is_stopped:
            return _worker_error(f"worker {process.label} was shut down before the result of {where} was read.", worker)
        place = f" on node {process.node}, pid {process.home.address.pid}" if process.home else ""
        seen = f"\nWhat is left of it:\n{observe(process.home)}" if process.home else ""
        fate = WorkerDiedError(
            f"worker {process.label}{place} died while {where} was waited for: {_exit_reason(error)}{seen}",
            role=process.label.rpartition("/")[0],
            rank=process.rank,
            node=process.node,
        )
        self._end(process, fate)
        return fate

    def _end(self, process: RayProcess, fate: WorkerError) -> None:
        for peer in process.peers:
            peer.fate = self._fates[peer.actor._actor_id.hex()] = fate
        self._stop(process.peers)

    def _process_of(self, error: RayActorError) -> RayProcess | None:
        for process in self._processes:
            if error.actor_id is not None and process.actor._actor_id.hex() == error.actor_id:
                return process
        return None

    def _tell_overdue(self, overdue: list[RayCall], awaited: RayCall, now: float) -> WorkerTimeoutError:
        """The error for calls over their deadline, with what their processes were doing; these are ended then."""
        first = overdue[0]
        ranks = ", ".join(str(call.worker.rank) for call in overdue)
        lines = [
            f"{first.where} on {first.worker.role}, rank {ranks}, is running for "
            f"{now - (first.running_since or now):.1f} s, longer than its deadline of {first.timeout_s:g} s "
            f"(controller.call_timeout_s)."
        ]
        if awaited is not first:
            lines.append(f"The controller waits for {awaited.where} on {awaited.worker.name}, which waits for it.")
        for call in overdue[:MAX_REPORTS]:
            home = call.worker.process.home
            lines += [f"{call.worker.name}:", observe(home) if home else "  its process has not started"]
        if len(overdue) > MAX_REPORTS:
            lines.append(f"... and {len(overdue) - MAX_REPORTS} more, which were not looked at.")
        lines += ["The controller itself waits here:", own_stacks()]
        fate = WorkerTimeoutError(
            "\n".join(lines), role=first.worker.role, rank=first.worker.rank, node=first.worker.process.node
        )
        for call in overdue:
            self._end(call.worker.process, fate)
        return fate


def _running(call: RayCall) -> RayCall:
    """Return what a call waits for: itself if it runs, else the oldest call of its process, or one that it reads."""
    while not call.is_finished:
        process = call.worker.process
        if call in process.unfinished[process.concurrent_calls :]:
            call = process.unfinished[0]
        elif (awaited := call.awaited()) is not None:
            call = awaited
        else:
            break
    return call


def _exit_reason(error: RayActorError) -> str:
    """What Ray says of the end of a process, without its advice."""
    text = str(error).partition("The actor is dead because")[2] or str(error)
    text = " ".join(text.partition("Some common causes")[0].split()).removeprefix("its worker process has died. ")
    if "connection error code 2" in text:  # all that Ray knows is that the connection ended
        text += f" {NO_LAST_WORD}"
    return text or type(error).__name__


def _worker_error(message: str, worker: RayWorker, kind: type[WorkerError] = WorkerError) -> WorkerError:
    return kind(message, role=worker.role, rank=worker.rank, node=worker.process.node)
