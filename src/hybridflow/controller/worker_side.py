"""The worker's side of one call, the same on every backend: errors name the worker, outputs match the declaration."""

import socket
from typing import Any

from hybridflow.controller.backend import CallTerms
from hybridflow.errors import HybridFlowError, LostWorkerError, WorkerError
from hybridflow.runtime.fault_points import current_worker
from hybridflow.runtime.observe import get_logger, log_memory
from hybridflow.runtime.rendezvous import is_lost_peer

logger = get_logger(__name__)


class NamingErrors:
    """A context that adds the method and the worker to errors; the worker is the current one of fault points.

    A HybridFlowError keeps its type and gets a note; any other error becomes a WorkerError, and one of a collective
    operation whose other rank is lost a LostWorkerError. Memory is logged before and after, at debug level.
    """

    __slots__ = ("_before", "_rank", "_role", "_where", "_worker_name")

    def __init__(self, where: str, worker_name: str, role: str, rank: int) -> None:
        self._where, self._worker_name, self._role, self._rank = where, worker_name, role, rank

    def __enter__(self) -> None:
        self._before = current_worker.set(self._worker_name)
        log_memory(f"before {self._where}, rank {self._rank}", logger)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        current_worker.reset(self._before)
        log_memory(f"after {self._where}, rank {self._rank}", logger)
        if isinstance(error, HybridFlowError):
            error.add_note(f"in {self._where}, worker {self._worker_name}")
        elif isinstance(error, Exception):
            is_lost = is_lost_peer(error)
            cause = "another rank died or timed out in a collective operation: " if is_lost else ""
            raise (LostWorkerError if is_lost else WorkerError)(
                f"{self._where} failed on worker {self._worker_name}: {cause}{described(error)}",
                role=self._role,
                rank=self._rank,
                node=socket.gethostname(),
            ) from error


def described(error: BaseException) -> str:
    """Return the type of an error and its text, if it has one."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error whose own text raises
        return f"{type(error).__name__}, which has no text"


def checked_output(output: Any, terms: CallTerms, rank: int) -> Any:
    """Check the output of a rank against the declaration and return it; return None if it will not be read."""
    if terms.columns is not None:
        terms.columns.check_output(output, rank, terms.num_rows)
    return output if terms.is_read else None
