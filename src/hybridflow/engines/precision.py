"""Float32 parameters under a model that computes in bfloat16.

The optimizer owns the parameters; the model holds their cast. A gradient is added to the parameter in float32 as soon
as it exists, so that accumulation over micro-batches loses nothing; one cast per update brings the model up to date.
"""

from functools import partial

import torch
from torch import Tensor, nn


class MasterParameters:
    """The parameters that learn, by name. They are the model's own where it computes in their dtype already."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self.by_name: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        if compute_dtype != torch.bfloat16:
            return
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().clone())
            self.by_name[name] = master
            self._pairs.append((master, parameter))
            # Parameters only: a buffer, such as the rotary frequencies, keeps its precision.
            parameter.data = parameter.data.to(compute_dtype)
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))

    @torch.no_grad()
    def cast(self) -> None:
        """Bring the model's parameters up to date with the masters."""
        for master, parameter in self._pairs:
            parameter.copy_(master)


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's new gradient to that of its master."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.add_(gradient)
