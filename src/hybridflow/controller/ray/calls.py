"""Sends calls to workers of a Ray cluster, stores values, and reads results.

group.method(batch) -> parts packed, put into the store of this node -> actor call on each rank
future, DataProto  <- status of each rank (small)  ..  batches stay in the stores until they are read
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from hybridflow.controller.backend import CallTerms, PerRank, WorkerRef
from hybridflow.controller.columns import produced_columns, sources_of
from hybridflow.controller.ray.processes import RayCall, RayHandle, RayWorker
from hybridflow.controller.ray.transport import Outgoing, freeze, pack_header, thaw
from hybridflow.controller.ray.waiting import STORE_FULL, Waiting
from hybridflow.controller.worker_side import described
from hybridflow.errors import DispatchError, LostWorkerError, WorkerError
from hybridflow.protocol import Handle
from hybridflow.protocol.packed_batch import batch_bytes
from hybridflow.runtime.observe import Trace, TraceEvent


class RayCalls:
    """The calls of a backend, and the `Store` of its handles; `waiting` waits for them, `trace` records them.

    `call_timeout_s()`: the deadline of a call, in seconds, or None. `compress`: as of `RayBackend`.
    """

    def __init__(
        self, waiting: Waiting, trace: Trace, call_timeout_s: Callable[[], float | None], compress: bool
    ) -> None:
        self._waiting, self._trace, self._call_timeout_s, self._compress = waiting, trace, call_timeout_s, compress
        self._node = socket.gethostname()

    def call_all(
        self, workers: Sequence[WorkerRef], method_name: str, per_rank: PerRank, terms: Sequence[CallTerms]
    ) -> list[RayHandle]:
        """Call the workers, as `Backend.call_all` specifies; all arguments are packed before the first call."""
        messages = [
            self._pack(worker, method_name, args, kwargs, own_terms)
            for worker, (args, kwargs), own_terms in zip(workers, per_rank, terms, strict=True)
        ]
        handles = []
        for worker, where, is_read, frozen, outgoing, after in messages:
            start = time.time()
            in_second_thread = (worker.role, method_name) in worker.process.threads.of_second
            remote = worker.process.remote_call(2 if is_read else 1, in_second_thread)
            try:
                refs = remote.remote(frozen, *outgoing.refs)
            except STORE_FULL as error:
                raise worker.error(
                    WorkerError,
                    f"the arguments of {where} for worker {worker.name}, {outgoing.num_bytes} bytes, fit neither into "
                    f"the shared memory of this node nor on its disk ({type(error).__name__}); use smaller batches, a "
                    f"larger controller.object_store_bytes, or free disk space.",
                ) from error
            done, value = refs if is_read else (refs, None)
            sources = sources_of(outgoing.read)
            call = RayCall(
                done, worker, where, self._call_timeout_s(), after, sources, in_second_thread=in_second_thread
            )
            self._waiting.track(call)
            if sent := outgoing.num_bytes:
                event = TraceEvent("send", where, worker.name, self._node, start, time.time(), bytes_out=sent)
                self._trace.record(event)
            handles.append(RayHandle(self, value, call))
        return handles

    def _pack(
        self, worker: WorkerRef, method_name: str, args: Sequence[Any], kwargs: Mapping[str, Any], terms: CallTerms
    ) -> tuple[RayWorker, str, bool, Any, Outgoing, list[RayCall]]:
        """Return the worker, the name of the call, whether it is read, its message, and unfinished calls before it."""
        if not isinstance(worker, RayWorker) or worker.is_stopped or worker.process.is_stopped:
            raise self._stopped_error(worker, method_name)
        where, opens = f"{worker.class_name}.{method_name}", terms.opens_futures
        outgoing = Outgoing(_ref_of, self._compress)
        own_args = [outgoing.pack(value, f"argument {index} of {where}", opens) for index, value in enumerate(args)]
        own_kwargs = {key: outgoing.pack(value, f"argument {key} of {where}", opens) for key, value in kwargs.items()}
        own = [handle.call for handle in outgoing.handles]
        others = [other.call for handle in outgoing.handles for other in handle.others if isinstance(other, RayHandle)]
        outgoing.also_wait_for(call.done for call in others if call)  # they are not read, but must have succeeded
        frozen = _frozen((pack_header(worker.role, method_name, terms), own_args, own_kwargs), outgoing, where)
        unfinished = [call for call in (*others, *own) if call and not call.is_finished]
        return worker, where, terms.is_read, frozen, outgoing, unfinished

    def _stopped_error(self, worker: WorkerRef, method_name: str) -> WorkerError:
        if not isinstance(worker, RayWorker):
            return WorkerError(f"worker {worker.name} belongs to another backend; call {method_name} on that one.")
        cause = worker.process.exit_error
        state = f"has exited ({str(cause).partition(chr(10))[0]})" if cause else "was shut down"
        text = f"worker {worker.name} {state}; {method_name} cannot be called on it."
        return worker.error(LostWorkerError if cause else WorkerError, text)

    def put(self, value: Any) -> RayHandle:
        """Store a value in the object store of this node."""
        outgoing = Outgoing(compress=self._compress)
        packed = outgoing.pack(value, "a value to put")
        frozen = _frozen(packed, outgoing, "put")
        return RayHandle(self, ray.put(frozen), produced=produced_columns(value))

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait for the calls. Raises the first error at once, and WorkerTimeoutError for a call over its deadline."""
        calls = [handle.call for handle in handles if isinstance(handle, RayHandle) and handle.call is not None]
        if not all(call.is_finished for call in calls):
            self._require_connection()
        self._waiting.wait(calls)

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        """Wait for all values and return them in order."""
        self.wait(handles)
        return [handle.get() for handle in handles]

    def release(self, handles: Sequence[Handle]) -> None:
        """Release the values."""
        for handle in handles:
            if isinstance(handle, RayHandle):
                handle.release()

    def note_read(self, handle: RayHandle, start: float, contents: Any) -> None:
        """Record in the trace that the controller read `contents`, starting at time `start`."""
        if columns := produced_columns(contents):
            name, sources = handle.call.worker.name if handle.call else "", ((handle.where, columns),)
            size, end = batch_bytes(contents), time.time()
            self._trace.record(
                TraceEvent("read", handle.where, name, self._node, start, end, bytes_in=size, sources=sources)
            )

    def fetch(self, handle: RayHandle) -> Any:
        """Return the packed value of a finished call, mapped from this node's store; fetch it there first if needed."""
        if handle.ref is None:
            raise WorkerError("this result was released; keep the future, or the result of get(), not the handle.")
        self._require_connection()
        try:
            if handle.call is not None and handle.call.small_value is not None:
                return thaw(handle.call.small_value)
            return thaw(ray.get(handle.ref))
        except RayError as error:  # the call succeeded, but its result could not be stored or fetched
            if handle.call is None:
                raise LostWorkerError(f"a value that was put is lost: {error}") from error
            raise self._waiting.failure(handle.call, getattr(error, "cause", error), error) from None

    def _require_connection(self) -> None:
        if not ray.is_initialized():  # ray.get would connect to another cluster or start one
            raise WorkerError("this backend was closed, and its results are gone; read futures before closing it.")


def _ref_of(value: Any) -> Any:
    """Return the stored object of a handle of this backend; None for other values."""
    if not isinstance(value, RayHandle):
        return None
    if value.ref is None:
        raise WorkerError("this result was released; keep the future, not the handle.")
    return value.ref


def _frozen(value: Any, outgoing: Outgoing, where: str) -> Any:
    """Freeze a message (see `freeze`). Raises DispatchError if it cannot be pickled."""
    try:
        return freeze(value, outgoing.num_bytes_in_all, outgoing.is_plain)
    except RecursionError:
        raise  # caused by a deeply nested future; the caller handles it
    except Exception as error:  # pickling an object may raise any error
        raise DispatchError(
            f"an argument of {where} cannot be sent to another process ({described(error)}); pass plain data."
        ) from error
