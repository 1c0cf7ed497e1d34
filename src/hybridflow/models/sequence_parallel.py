"""Sequence parallel: each rank has a shard of the tokens, and in attention all tokens of some heads.

DeepSpeed-Ulysses (Jacobs et al., 2023): an all-to-all before attention exchanges shards of tokens for shards of heads,
and a second one after attention reverses it. Heads that ranks cannot split evenly are repeated or padded.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hybridflow.models.attention import WholePlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.recurrence import Recurrence


class UlyssesPlan:
    """The attention `plan` of whole sequences, applied to queries, keys and values of this rank's shard of tokens."""

    def __init__(self, plan: WholePlan, group: dist.ProcessGroup) -> None:
        self.plan, self._group = plan, group

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute the attention of one layer for this rank's tokens; all ranks of the group call it."""
        size, heads = self._group.size(), query.shape[1]
        repeats, padded = shared_heads(heads, key.shape[1], size)
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        if padded > heads:  # then each query head has its own key head
            query, key, value = (pad(x, (0, 0, 0, 0, 0, padded - heads)) for x in (query, key, value))
        query, key, value = (self._tokens_of_some_heads(x) for x in (query, key, value))
        form = form.of_heads(self._group.rank(), size, padded)
        out = self.plan.attend(layer, query, key, value, form)
        return self._heads_of_some_tokens(out)[:, :, :heads]

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of all tokens on every rank, and return those of this rank."""
        size, width = self._group.size(), hidden.shape[1]
        parts = _AllToAll.apply(hidden.expand(size, *hidden.shape), self._group)  # each rank's shard goes to all ranks
        tokens = parts.movedim(0, 1).flatten(1, 2)
        return self.plan.recur(layer, tokens, compute).narrow(1, self._group.rank() * width, width)

    def _tokens_of_some_heads(self, x: Tensor) -> Tensor:
        """Exchange (batch, heads, shard, dim) for (batch, heads / ranks, tokens, dim)."""
        x = x.unflatten(1, (self._group.size(), -1)).movedim(1, 0)  # (ranks, batch, heads / ranks, shard, dim)
        return _AllToAll.apply(x, self._group).movedim(0, 2).flatten(2, 3)

    def _heads_of_some_tokens(self, x: Tensor) -> Tensor:
        """Exchange (batch, tokens, heads / ranks, dim) for (batch, shard, heads, dim)."""
        x = x.unflatten(1, (self._group.size(), -1)).movedim(1, 0)  # (ranks, batch, shard, heads / ranks, dim)
        return _AllToAll.apply(x, self._group).movedim(0, 2).flatten(2, 3)


def shared_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Return the repetitions of each key-value head, and the padded number of query heads, for an even split.

    Each rank gets the key-value heads of its query heads.
    """
    groups = heads // kv_heads
    for repeats in range(1, groups + 1):
        if groups % repeats == 0 and kv_heads * repeats % ranks == 0:
            return repeats, heads
    return groups, -(-heads // ranks) * ranks


class GatherTokens(torch.autograd.Function):
    """All-gather of values of this rank's tokens, (count, ...), to their indices among all tokens, (total, ...).

    The result is equal on all ranks. Each computes the same loss from it, so each keeps its part of the gradient.
    """

    @staticmethod
    def forward(ctx, values, indices, total, group):
        """Gather the values of all ranks."""
        ctx.save_for_backward(indices)
        gathered = values.new_zeros(total, *values.shape[1:])
        gathered[indices] = values
        dist.all_reduce(gathered, group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Return the gradient of this rank's values."""
        (indices,) = ctx.saved_tensors
        return grad[indices], None, None, None


class _AllToAll(torch.autograd.Function):
    """An all-to-all: part i is sent to rank i, and part i of the result is received from rank i."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
