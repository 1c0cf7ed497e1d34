"""Attention of packed rows that share a prompt, which is computed once for all of its responses."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hybridflow.kernels import causal_attention, serves
from hybridflow.models.attention import SHORT, pytorch_attention, run_attention

LONG_PROMPT = 256
"""Shortest shared prompt for which sharing is faster with PyTorch's attention, if it is at least half of the sequence
(docs/benchmarks.md)."""


def sharing_pays(shared: Tensor, lengths: Tensor, compiled: bool) -> Tensor:
    """Return, for each sequence of `lengths` tokens, whether sharing its first `shared` tokens is faster.

    `compiled`: whether a compiled attention kernel supports the model. PyTorch's attention then needs a masked call per
    sequence, which costs more than a short prompt.
    """
    is_long = (shared >= LONG_PROMPT) & (2 * shared >= lengths)
    return is_long | (lengths <= SHORT) if compiled else is_long


@dataclass(frozen=True)
class SharedPromptPlan:
    """Causal attention of families of sequences that are packed into a single row (batch 1).

    A family is a tuple of lengths, each at least 1: a trunk, which is the shared prompt, and branches, each of which
    attends to the trunk and to itself. A sequence that shares nothing is a family with a trunk only.
    """

    families: tuple[tuple[int, ...], ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute the attention of one layer."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (tokens, heads, dim)
        compiled = serves(query) and query.shape[-1] == value.shape[-1]
        outputs, start = [], 0
        for is_short, part in groupby(self.families, lambda family: compiled and _longest(family) <= SHORT):
            families = list(part)
            stop = start + sum(map(sum, families))
            q, k, v = (x[start:stop] for x in (query, key, value))
            if is_short:
                outputs.append(causal_attention(q, k, v, families, scaling))
            else:
                outputs += _attend_by_family(q, k, v, families, scaling)
            start = stop
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def with_filling(self, count: int) -> "SharedPromptPlan":
        """Return a plan with one more family of `count` padding tokens."""
        return SharedPromptPlan((*self.families, (count,))) if count else self


def _longest(family: Sequence[int]) -> int:
    return family[0] + max(family[1:], default=0)


def _attend_by_family(
    query: Tensor, key: Tensor, value: Tensor, families: Sequence[Sequence[int]], scaling: float
) -> list[Tensor]:
    """Compute PyTorch's attention of each trunk and branch, (length, heads, dim) each."""
    outputs, start = [], 0
    for trunk, *branches in families:
        begin, start = start, start + trunk
        outputs.append(run_attention(query[begin:start], key[begin:start], value[begin:start], 1, trunk, scaling))
        for branch in branches:
            stop = start + branch
            keys, values = (torch.cat([x[begin : begin + trunk], x[start:stop]]) for x in (key, value))
            seen = torch.ones(branch, trunk + branch, dtype=torch.bool, device=query.device).tril(trunk)
            q, k, v = (x.transpose(0, 1)[None] for x in (query[start:stop], keys, values))
            outputs.append(pytorch_attention(q, k, v, scaling, seen)[0].transpose(0, 1))
            start = stop
    return outputs
