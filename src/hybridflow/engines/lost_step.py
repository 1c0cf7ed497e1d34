"""Errors in the middle of a step: out of memory, lost ranks, and ranks that are out of sync."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridflow.engines.ranks import Ranks
from hybridflow.errors import BatchError, HybridFlowError, LostWorkerError, OutOfMemoryError, WorkerError
from hybridflow.runtime.memory import is_out_of_memory, out_of_memory
from hybridflow.runtime.rendezvous import is_lost_peer


class StepGuard:
    """A context for collective computation. After an error the ranks are out of sync; later uses raise WorkerError.

    A BatchError is raised by all ranks, so they stay in sync.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device, self._cause = ranks, device, ""

    @contextmanager
    def __call__(self, step: str = "an update") -> Iterator[None]:
        """Enter the context of a `step`, which errors name.

        Raises WorkerError after an earlier error, OutOfMemoryError if memory runs out, LostWorkerError if a rank is
        lost.
        """
        if self._cause:
            raise WorkerError(
                f"this rank is out of sync with the others since an earlier step failed ({self._cause}); restart the "
                "workers from the last checkpoint.",
                rank=self._ranks.place_in_world,
            )
        try:
            yield
        except BatchError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            if not self._ranks.is_alone:
                self._cause = text[:200]
            if isinstance(error, HybridFlowError):
                raise
            if is_out_of_memory(error):
                where = f"{step}, nothing was applied"
                raise out_of_memory(error, where, self._device, kind=OutOfMemoryError) from error
            if is_lost_peer(error):
                raise LostWorkerError(
                    f"another rank died or timed out in a collective operation, and the step was not applied: "
                    f"{text[:300]}; see that rank's error or log for the cause.",
                    rank=self._ranks.place_in_world,
                ) from error
            raise
