"""The norm of a gradient that is sharded over ranks, and gradient clipping."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hybridflow.engines.ranks import SHARD, TENSOR, Ranks


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, ranks: Ranks) -> float:
    """Scale the gradients to a norm over all parameters and ranks of at most `max_norm`; return the norm before."""
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    if ranks.is_alone:
        return float(torch.nn.utils.clip_grad_norm_(learning, max_norm, foreach=True))
    gradients = {is_sharded: [] for is_sharded in (True, False)}
    for parameter in learning:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        is_sharded = ranks.tensor == 1 or isinstance(gradient.placements[-1], Shard)
        gradients[is_sharded].append(gradient.to_local())
    # Gradients that all tensor parallel ranks have are counted on the first of these ranks.
    counted = gradients[True] + (gradients[False] if ranks.place(TENSOR) == 0 else [])
    own = float(torch.nn.utils.get_total_norm(counted, foreach=True)) ** 2
    norm = ranks.sum_floats([own], (SHARD, TENSOR))[0] ** 0.5
    scale = min(max_norm / (norm + 1e-6), 1.0)  # as in torch.nn.utils.clip_grad_norm_
    for gradient in gradients[True] + gradients[False]:
        gradient.mul_(scale)
    return norm
