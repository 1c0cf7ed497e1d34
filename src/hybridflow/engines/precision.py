"""Float32 parameters under a model that computes in bfloat16.

The optimizer owns the parameters; the model holds their cast. A gradient is added to the parameter in float32
as soon as it exists, so that accumulation over micro-batches loses nothing; one cast per update brings the model up to date.
"""

import torch
from torch import Tensor, nn


class MasterParameters:
    """The parameters that learn, by name. They are the model's own where it computes in their dtype already."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []
        self.by_name: dict[str, nn.Parameter] = {}
        if compute_dtype != torch.bfloat16:
            self.by_name = dict(model.named_parameters())
            return
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().clone())
            self.by_name[name] = master
            self._pairs.append((master, parameter))
        for master, parameter in self._pairs:
            # Parameters only: a buffer, such as the rotary frequencies, keeps its precision.
            parameter.data = parameter.data.to(compute_dtype)
            parameter.register_post_accumulate_grad_hook(_moves_gradient_to(master))

    def cast(self) -> None:
        """Bring the model's parameters up to date with the masters."""
        if self._pairs:
            masters, casts = zip(*self._pairs, strict=True)
            torch._foreach_copy_([p.data for p in casts], [p.data for p in masters])


def _moves_gradient_to(master: nn.Parameter):
    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return move
