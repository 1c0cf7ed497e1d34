"""When FSDP2 sums gradients over the ranks: after each micro-batch, or once per update if memory allows."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hybridflow.engines.ranks import Ranks
from hybridflow.models.forward import memory_of

SHARE_OF_MEMORY = 8
"""Gradients are summed once per update if, unsharded and in float32, they take at most 1/8 of a GPU's memory."""

T = TypeVar("T")


class GradientReduction:
    """The time of the sum over the ranks; the same on all ranks, and by a rule that does not depend on free memory.

    One sum per update sends the bytes of one micro-batch instead of those of all, but keeps the gradients of a rank
    unsharded until then. Both add the same numbers, in a different order.
    """

    def __init__(self, model: nn.Module, is_once_per_update: bool) -> None:
        self._model, self.is_once_per_update = model, is_once_per_update

    def of_micro_batches(
        self, micro_batches: Sequence[T], *, is_first_part: bool = True, is_last_part: bool = True
    ) -> Iterator[T]:
        """Yield the micro-batches of an update, or of a part of one, in order.

        The backward pass of each, or of the last one of the last part, sums over the ranks.
        """
        if is_first_part:
            self._drop()  # gradients of an update that failed
        try:
            for number, micro_batch in enumerate(micro_batches, start=1):
                self._sum_next(is_last_part and number == len(micro_batches))
                yield micro_batch
        finally:
            self._sum_next(True)

    @contextmanager
    def of_no_last_micro_batch(self) -> Iterator[None]:
        """Inside the context gradients are kept as those of all micro-batches but the last; then they are dropped."""
        self._sum_next(False)
        try:
            yield
        finally:
            self._sum_next(True)
            self._drop()

    def _sum_next(self, sums: bool) -> None:
        """Set whether the next backward pass sums over the ranks."""
        if self.is_once_per_update and isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(sums)

    def _drop(self) -> None:
        """Forget gradients that no sum over the ranks followed."""
        for module in self._model.modules() if self.is_once_per_update else ():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for parameter in group.fsdp_params if group else ():
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # it was gathered before
                    parameter._unsharded_param.grad = None


def fits_unsharded(parameters: Iterable[torch.Tensor], ranks: Ranks, device: torch.device) -> bool:
    """Return whether unsharded float32 gradients of these parameters take a small part of every rank's GPU.

    All ranks call it. It is False on a CPU, where a sum sends nothing over a network.
    """
    num_bytes = 4 * sum(p.numel() for p in parameters if p.requires_grad) // ranks.tensor
    fits = device.type == "cuda" and num_bytes <= memory_of(device) // SHARE_OF_MEMORY
    return ranks.count_all(not fits) == 0
