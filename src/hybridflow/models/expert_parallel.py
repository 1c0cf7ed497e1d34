"""Expert parallel: each rank of an axis holds a part of the experts of a layer, and tokens go to the rank of theirs.

    rank           0            1           4 experts, of which a token has 2
    experts       0 1          2 3
    tokens       a b            c           a: 0 3, b: 1 2, c: 0 1
    receives   a b c c         b a          by one all-to-all; another returns the results

The rank of a token adds up the results of its experts. The backward pass sums the gradients of an expert over the
tokens of all ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PretrainedConfig

from hybridflow.errors import ModelConfigError
from hybridflow.models.experts import experts_of, sizes_of_experts
from hybridflow.runtime.boxes import local


def require_expert_parallel(config: PretrainedConfig, size: int, model: nn.Module | None = None) -> None:
    """Raise ModelConfigError unless each of `size` ranks can hold as many experts of a model as every other.

    `model`: the model of this configuration, if it has been built; then its modules are looked at, too.
    """
    if size == 1:
        return
    sizes = sizes_of_experts(config)
    if sizes is None or (model is not None and not experts_of(model)):
        raise ModelConfigError(
            f"parallel.expert={size} is not supported for {config.model_type} models, which have no experts that "
            "ranks can hold apart; use parallel.expert = 1."
        )
    if sizes[1] % size:
        raise ModelConfigError(
            f"parallel.expert={size} does not divide the {sizes[1]} experts of this model; use a divisor of them."
        )


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the weights of experts by DTensors on a one-axis mesh, over which their tokens are exchanged."""
    for experts in experts_of(model):
        module: Any = experts
        for name, parameter in module.named_parameters(recurse=False):
            shared = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(shared, requires_grad=parameter.requires_grad)
        module.num_experts //= mesh.size()
        module.forward = partial(_compute_apart, module, mesh.get_group(), module.forward)


def _compute_apart(
    experts: Any,
    group: dist.ProcessGroup,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute the weighted sum (tokens, hidden) of the experts `chosen` (tokens, k), which any rank may hold."""
    of_rank, ranks = experts.num_experts, group.size()
    order = chosen.flatten().argsort(stable=True)
    ids = torch.arange(of_rank * ranks, device=chosen.device)
    sent_of = (chosen.flatten() == ids[:, None]).sum(1).view(ranks, of_rank)  # rows for each expert of each rank
    received_of = torch.empty_like(sent_of)
    dist.all_to_all_single(received_of, sent_of, group=group)
    sent, received = torch.stack([sent_of.sum(1), received_of.sum(1)]).tolist()
    rows = _Exchange.apply(hidden[order // chosen.shape[1]], received, sent, group)
    own = ids[:of_rank].repeat(ranks).repeat_interleave(received_of.flatten(), output_size=len(rows))
    whole = dict(experts._parameters)
    experts._parameters.update({name: local(parameter) for name, parameter in whole.items()})
    try:
        if len(rows):
            results = compute(rows, own[:, None], torch.ones_like(rows[:, :1]))
        else:  # a row that no one receives, so that the backward pass has all its exchanges and reductions
            results = compute(rows.sum(0, keepdim=True), ids[:1, None], torch.ones_like(rows.sum(0)[None, :1]))[:0]
    finally:
        experts._parameters.update(whole)
    returned = _Exchange.apply(results, sent, received, group)
    at_tokens = torch.empty_like(returned).index_copy(0, order, returned).unflatten(0, chosen.shape)
    return (at_tokens * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


class _Exchange(torch.autograd.Function):
    """Sends `sent` rows to each rank of a group, and receives `received` rows of each, in the order of the ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _exchanged(rows, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent = ctx.sizes
        return _exchanged(grad, sent, received, ctx.group), None, None, None


def _exchanged(rows: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out
