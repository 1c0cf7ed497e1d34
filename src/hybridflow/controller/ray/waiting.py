"""Waiting for calls: until they have ended, one has failed, a process has died, or a deadline has passed.

Whoever waits learns who is waited for, and why that does not answer.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hybridflow.controller.ray.processes import RayHandle, RayProcess, RayWorker
from hybridflow.controller.ray.transport import CallFailed, Reply
from hybridflow.controller.ray.watch import observe
from hybridflow.errors import WorkerDiedError, WorkerError, WorkerTimeoutError
from hybridflow.observability import Trace
from hybridflow.runtime.process_report import own_stacks

SLICE_S = 0.2
"""How often a wait looks whether somebody has failed or is overdue."""

MAX_REPORTS = 4
"""Workers that a report of an overdue call looks at."""


class Waiting:
    """`call_timeout_s`: the deadline of every call, None for none. `processes`: those that run. `stop` ends some.
    `trace` hears of every call that has ended."""

    def __init__(
        self,
        call_timeout_s: float | None,
        processes: list[RayProcess],
        stop: Callable[[Sequence[RayProcess]], None],
        trace: Trace,
    ) -> None:
        self.call_timeout_s, self._processes, self._stop, self._trace = call_timeout_s, processes, stop, trace

    def note_ended(self) -> None:
        """Take notice of calls that have ended without anybody waiting for them; errors are left to whoever does."""
        for process in self._processes:
            for handle in [handle for handle in process.unfinished if handle.done is not None]:
                if not self._has_ended(handle):
                    break
                with contextlib.suppress(Exception):  # it is raised again when the result is read
                    self._finish(handle)

    def wait(self, handles: Sequence[RayHandle]) -> None:
        """Until all calls have ended. Raises the error of the first that failed, at once, and WorkerTimeoutError for
        one that is over its deadline."""
        pending = {h.done: h for h in handles if h.done is not None and not h.is_finished}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=SLICE_S, fetch_local=False)
            for ref in ready:
                self._finish(pending.pop(ref))
            if pending:
                self._check_deadlines(list(pending.values()))

    def _finish(self, handle: RayHandle) -> None:
        """Note that a call has ended. Raises what it raised."""
        worker = handle.worker
        assert worker is not None
        if handle in worker.process.unfinished:
            worker.process.unfinished.remove(handle)
        failure: BaseException | None = None
        try:
            reply: Any = ray.get(handle.done)
            if isinstance(reply, Reply):
                self._trace.record(reply.event)
        except RayTaskError as error:
            cause: Any = error.cause
            failure = cause.error() if isinstance(cause, CallFailed) else _as_worker_error(error, worker, handle.where)
        except RayActorError as error:
            failure = self._tell_death(worker, handle.where, error)
        except RayError as error:
            failure = _as_worker_error(error, worker, handle.where)
        if failure is not None:
            raise failure  # out here, so that its cause is its own
        handle.is_finished = True
        handle.after = []

    def _check_deadlines(self, pending: list[RayHandle]) -> None:
        if self.call_timeout_s is None:
            return
        now = time.monotonic()
        running = list(dict.fromkeys(self._running(handle) for handle in pending))
        for handle in running:
            handle.running_since = handle.running_since or now
        overdue = [h for h in running if h.running_since is not None and now - h.running_since > self.call_timeout_s]
        if overdue:
            raise self._tell_overdue(overdue, pending[0], now)

    def _running(self, handle: RayHandle) -> RayHandle:
        """Whom a call waits for: itself if it runs, else the oldest call before it on its process, or what it reads."""
        while True:
            assert handle.worker is not None
            queue = handle.worker.process.unfinished
            while queue and queue[0] is not handle and self._has_ended(queue[0]):
                queue.pop(0)
            if queue and queue[0] is not handle and handle in queue:
                handle = queue[0]
                continue
            handle.after = [source for source in handle.after if not self._has_ended(source)]
            if not handle.after:
                return handle
            handle = handle.after[0]

    def _has_ended(self, handle: RayHandle) -> bool:
        if handle.is_finished or handle.done is None:
            return True
        ready, _ = ray.wait([handle.done], timeout=0, fetch_local=False)
        return bool(ready)

    # ------------------------------------------------------------------------------------------ bad news

    def _tell_death(self, worker: RayWorker, where: str, error: RayActorError) -> WorkerError:
        """The error for a process that is gone; its peers, which may wait for it in a collective, are ended too."""
        process = self._process_of(error) or worker.process
        if process.fate is None:
            home = process.home
            place = f" on node {home.node_address}, pid {home.pulse.pid}" if home else ""
            reason = _exit_reason(error)
            seen = f"\nWhat is left of it:\n{observe(home)}" if home else ""
            fate = WorkerDiedError(
                f"worker {process.label}{place} died while {where or 'a call'} was waited for: {reason}{seen}",
                role=worker.role,
                rank=process.rank,
                node=home.node_address if home else "",
            )
            for peer in process.peers:
                peer.fate = fate
            self._stop(process.peers)
            return fate
        return process.fate

    def _process_of(self, error: RayActorError) -> RayProcess | None:
        dead = error.actor_id
        for process in self._processes:
            if dead is not None and process.actor._actor_id.hex() == dead:
                return process
        return None

    def _tell_overdue(self, overdue: list[RayHandle], awaited: RayHandle, now: float) -> WorkerTimeoutError:
        """The error for calls over their deadline, with what their processes were doing; these are ended then."""
        first = overdue[0]
        assert first.worker is not None
        assert awaited.worker is not None
        names = ", ".join(f"rank {h.worker.rank}" for h in overdue if h.worker is not None)
        lines = [
            f"{first.where} on {first.worker.role} {names} has been running for "
            f"{now - (first.running_since or now):.1f} s, longer than its deadline of {self.call_timeout_s:g} s "
            f"(controller.call_timeout_s)."
        ]
        if awaited is not first:
            lines.append(f"The controller waits for {awaited.where} on {awaited.worker.name}, which waits for it.")
        for handle in overdue[:MAX_REPORTS]:
            assert handle.worker is not None
            lines += [f"{handle.worker.name}:", observe(handle.worker.process.home)]
        if len(overdue) > MAX_REPORTS:
            lines.append(f"... and {len(overdue) - MAX_REPORTS} more, which were not looked at.")
        lines += ["The controller itself waits here:", own_stacks()]
        home = first.worker.process.home
        fate = WorkerTimeoutError(
            "\n".join(lines),
            role=first.worker.role,
            rank=first.worker.rank,
            node=home.node_address if home else "",
        )
        for handle in overdue:
            assert handle.worker is not None
            for peer in handle.worker.process.peers:
                peer.fate = fate
            self._stop(handle.worker.process.peers)
        return fate


def _exit_reason(error: RayActorError) -> str:
    """What Ray says of the end of a process, without its advice."""
    text = str(error).partition("The actor is dead because")[2] or str(error)
    text = text.partition("Some common causes")[0]
    return " ".join(text.split()).removeprefix("its worker process has died. ") or type(error).__name__


def _as_worker_error(error: Exception, worker: RayWorker, where: str) -> WorkerError:
    node = worker.process.home.node_address if worker.process.home else ""
    return WorkerError(
        f"{where} failed on worker {worker.name}: {error}", role=worker.role, rank=worker.rank, node=node
    )
