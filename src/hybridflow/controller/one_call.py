"""One call as the worker's side sees it, the same on every backend: whose fault an error is, and whether what a method
returns is what it declared.
"""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from hybridflow.controller.backend import CallTerms
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.observability import get_logger, log_memory


@contextmanager
def naming_errors(where: str, worker_name: str, role: str, rank: int) -> Iterator[None]:
    """An error of our own keeps its type and gets a note; any other becomes a WorkerError that says who. Memory is
    logged before and after, at debug level."""
    logger = _logger()
    log_memory(f"before {where}, rank {rank}", logger)
    try:
        yield
    except HybridFlowError as error:
        error.add_note(f"in {where}, worker {worker_name}")
        raise
    except Exception as error:
        raise WorkerError(
            f"{where} failed on worker {worker_name}: {described(error)}",
            role=role,
            rank=rank,
            node=socket.gethostname(),
        ) from error
    finally:
        log_memory(f"after {where}, rank {rank}", logger)


@cache
def _logger() -> logging.Logger:
    return get_logger(__name__)


def described(error: BaseException) -> str:
    """The type of an error and its text, if it has one."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error whose own text raises
        return f"{type(error).__name__}, which has no text"


def checked_output(output: Any, terms: CallTerms, rank: int) -> Any:
    """What a rank returned, if it is what was declared; None if nobody will read it."""
    if terms.columns is not None:
        terms.columns.check_output(output, rank, terms.num_rows)
    return output if terms.is_read else None
