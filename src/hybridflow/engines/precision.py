"""Float32 master parameters of a model that computes in bfloat16.

The optimizer owns the masters; the model has their bfloat16 cast. Gradients are added to the masters in float32 as
soon as they are computed, so that accumulation over micro-batches does not round. One cast per update follows.
"""

from functools import partial

import torch
from torch import Tensor, nn


class MasterParameters:
    """The trained parameters by name; the model's parameters if it computes in their dtype."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self.by_name: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        if compute_dtype != torch.bfloat16:
            return
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().clone())
            self.by_name[name] = master
            self._pairs.append((master, parameter))
            # Buffers, such as rotary frequencies, keep their precision.
            parameter.data = parameter.data.to(compute_dtype)
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    @torch.no_grad()
    def cast(self) -> None:
        """Copy the masters to the model's parameters."""
        if self._pairs:
            masters, parameters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(parameters, masters)  # pyright: ignore[reportPrivateImportUsage]


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's new gradient to its master's gradient, and clear it."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
