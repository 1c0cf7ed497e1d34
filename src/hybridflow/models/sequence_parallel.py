"""Sequence parallel: each rank has a shard of the tokens, and in attention all tokens of some heads.

DeepSpeed-Ulysses (Jacobs et al., 2023): an all-to-all before attention turns shards of all heads into all tokens of
some heads, another one after it turns them back. Heads that the ranks cannot share evenly are repeated or filled up.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from hybridflow.models.attention import AttentionPlan


class UlyssesPlan:
    """`plan`, which is of the whole sequences, for queries, keys and values of this rank's shard of tokens."""

    def __init__(self, plan: AttentionPlan, group: dist.ProcessGroup) -> None:
        self.plan, self._group = plan, group

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        size, heads = self._group.size(), query.shape[1]
        repeats, filled = shared_heads(heads, key.shape[1], size)
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        if filled > heads:  # then each head of a query has its own key
            query, key, value = (pad(x, (0, 0, 0, 0, 0, filled - heads)) for x in (query, key, value))
        query, key, value = (self._tokens_of_some_heads(x) for x in (query, key, value))
        out = self.plan.attend(layer, query, key, value, scaling)
        return self._heads_of_some_tokens(out)[:, :, :heads]

    def _tokens_of_some_heads(self, x: Tensor) -> Tensor:
        """(batch, heads, shard, dim) -> (batch, heads / ranks, tokens, dim)."""
        x = x.unflatten(1, (self._group.size(), -1)).movedim(1, 0)  # (ranks, batch, heads / ranks, shard, dim)
        return _AllToAll.apply(x, self._group).movedim(0, 2).flatten(2, 3)

    def _heads_of_some_tokens(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads / ranks, dim) -> (batch, shard, heads, dim)."""
        x = x.unflatten(1, (self._group.size(), -1)).movedim(1, 0)  # (ranks, batch, shard, heads / ranks, dim)
        return _AllToAll.apply(x, self._group).movedim(0, 2).flatten(2, 3)


def shared_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """How often each key-value head is repeated so that ranks share them evenly, and the heads of queries, filled up.

    The heads of a query that a rank gets must find their keys on it.
    """
    groups = heads // kv_heads
    for repeats in range(1, groups + 1):
        if groups % repeats == 0 and kv_heads * repeats % ranks == 0:
            return repeats, heads
    return groups, -(-heads // ranks) * ranks


class GatherTokens(torch.autograd.Function):
    """Values of this rank's tokens, (count, ...), at their places among all ranks' tokens, (total, ...); equal on all.

    Each rank computes the same from the result, so each takes its own part of the gradient.
    """

    @staticmethod
    def forward(ctx, values, places, total, group):
        ctx.save_for_backward(places)
        everywhere = values.new_zeros(total, *values.shape[1:])
        everywhere[places] = values
        dist.all_reduce(everywhere, group=group)
        return everywhere

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None


class _AllToAll(torch.autograd.Function):
    """Part i goes to rank i, and part i of the result came from rank i."""

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
