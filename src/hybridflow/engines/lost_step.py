"""What an error in the middle of a step means: of memory, of another rank, and that sharded ranks cannot go on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hybridflow.engines.ranks import Ranks
from hybridflow.errors import BatchError, HybridFlowError, LostWorkerError, ModelError, WorkerError

LESS_MEMORY = (
    "set a smaller memory.max_tokens_per_micro_batch, model.gradient_checkpointing = true, or memory.offload for roles "
    "that can wait"
)


class StepGuard:
    """Around what ranks compute together. Left by an error, they are out of step, and it lets nobody in again.

    A BatchError is one that all of them raise.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._why = ranks, ""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._why:
            raise WorkerError(
                f"this rank left a step that others were in ({self._why}), so gradients could be of different rows; "
                "start the workers again, from the last checkpoint.",
                rank=self._ranks.place_in_world,
            )
        try:
            yield
        except BatchError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            if not self._ranks.is_alone:
                self._why = text[:200]
            if isinstance(error, HybridFlowError):
                raise
            # PyTorch has no type for a host that is out of memory.
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in text:
                raise ModelError(
                    f"out of memory in a step, which is lost: {text[:300]}. Nothing was applied; {LESS_MEMORY}."
                ) from error
            if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text[:300].lower()):
                raise LostWorkerError(
                    f"another rank died or was late in a collective: {text[:300]}. This step is lost and nothing was "
                    "applied; the cause is in that rank's own error or log.",
                    rank=self._ranks.place_in_world,
                ) from error
            raise
