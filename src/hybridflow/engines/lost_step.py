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
            if not self._ranks.is_alone:
                self._why = " ".join(str(error).split())[:200]
            if reason := _explain(error):
                if _is_of_memory(error):
                    raise ModelError(reason) from error
                raise LostWorkerError(reason, rank=self._ranks.place_in_world) from error
            raise


def _is_of_memory(error: Exception) -> bool:
    """Of a device, or of the host, where PyTorch has no type for it."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _explain(error: Exception) -> str:
    """What to tell of an error of PyTorch; "" of any other."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, HybridFlowError):
        return ""
    if _is_of_memory(error):
        return f"out of memory in a step, which is lost: {text}. Nothing was applied; {LESS_MEMORY}."
    is_of_group = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in text.lower())
    if is_of_group:
        return (
            f"another rank died or was late in a collective: {text}. This step is lost and nothing was applied; "
            "the cause is in that rank's own error or log."
        )
    return ""
