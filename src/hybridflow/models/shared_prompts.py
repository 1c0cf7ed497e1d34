"""Attention of packed rows that share a prompt, which is computed once for all of its responses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hybridflow.models.attention import SHORT, PackedPlan, pytorch_attention, run_attention
from hybridflow.models.attention_backend import AttentionCase, AttentionName, attention_for
from hybridflow.models.attention_form import AttentionForm, attention_by_form
from hybridflow.models.block_mask import block_mask_of, masked_attention
from hybridflow.models.exact_attention import attend_exactly
from hybridflow.models.kernels.attention import causal_attention
from hybridflow.models.recurrence import Recurrence
from hybridflow.models.varlen import upload

LONG_PROMPT = 256
"""Shortest shared prompt for which sharing is faster with PyTorch's attention, if it is at least half of the sequence
(docs/benchmarks.md)."""

FLEX_PART = 8
"""With FlexAttention a prompt is shared if it is at least 1 / FLEX_PART of the sequence; not measured."""


def sharing_pays(shared: Tensor, lengths: Tensor, attention: AttentionName) -> Tensor:
    """Return, for each sequence of `lengths` tokens, whether sharing its first `shared` tokens is faster.

    `attention`: the implementation for shared prompts. FlexAttention is one call for all sequences, so that sharing
    costs little. PyTorch's attention needs a masked call per sequence, which costs more than a short prompt; on a CPU
    it computes long sequences.
    """
    if attention == "flex":
        return FLEX_PART * shared >= lengths
    is_long = (shared >= LONG_PROMPT) & (2 * shared >= lengths)
    return is_long | (lengths <= SHORT) if attention == "cpu_kernel" else is_long


@dataclass(frozen=True)
class SharedPromptPlan:
    """Causal attention of families of sequences that are packed into a single row (batch 1).

    A family is a tuple of lengths, each at least 1: a trunk, which is the shared prompt, and branches, each of which
    attends to the trunk and to itself. A sequence that shares nothing is a family with a trunk only.
    """

    families: tuple[tuple[int, ...], ...]
    _masks: dict[torch.device, BlockMask] = field(default_factory=dict, init=False, compare=False, repr=False)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute the attention of one layer."""
        if form.exact:
            return attend_exactly(self.attend, layer, query, key, value, form, self.families)
        form, scaling = form.within(max(map(_longest, self.families))), form.scaling
        implementation = attention_for(AttentionCase.of(query, key, value), shares_prompts=True)
        if implementation == "flex" and form.is_plain:
            return masked_attention(query, key, value, self._mask(query.device), scaling).transpose(1, 2)
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, dim)
        compiled = implementation == "cpu_kernel" and form.is_plain
        outputs, start = [], 0
        for is_short, part in groupby(self.families, lambda family: compiled and _longest(family) <= SHORT):
            families = list(part)
            stop = start + sum(map(sum, families))
            q, k, v = (x[start:stop] for x in (query, key, value))
            if is_short:
                outputs.append(causal_attention(q, k, v, families, scaling))
            else:
                outputs += _attend_by_family(q, k, v, families, form)
            start = stop
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of whole sequences, each with a trunk of its own: states do not leave the layer."""
        tokens, first, plan = self._whole
        expanded = plan.recur(layer, hidden[:, upload(tokens, hidden.device)], compute)
        return expanded[:, upload(first, hidden.device)]

    @cached_property
    def _whole(self) -> tuple[np.ndarray, np.ndarray, PackedPlan]:
        """The tokens of each trunk with each of its branches, where each token is first among them, and their plan."""
        tokens, start = [], 0
        for trunk, *branches in self.families:
            ends = np.cumsum([start + trunk, *branches])
            own = np.arange(start, start + trunk)
            tokens += [np.r_[own, begin:end] for begin, end in pairwise(ends)] or [own]
            start = int(ends[-1])
        first = np.unique(np.concatenate(tokens), return_index=True)[1]
        return np.concatenate(tokens), first, PackedPlan.from_lengths([len(each) for each in tokens])

    def _mask(self, device: torch.device) -> BlockMask:
        """Return the block mask on a device, which is built at the first of the layers."""
        if device not in self._masks:
            self._masks[device] = block_mask_of(self.families, device)
        return self._masks[device]

    def with_filling(self, count: int) -> "SharedPromptPlan":
        """Return a plan with one more family of `count` padding tokens."""
        return SharedPromptPlan((*self.families, (count,))) if count else self


def _longest(family: Sequence[int]) -> int:
    return family[0] + max(family[1:], default=0)


def _attend_by_family(
    query: Tensor, key: Tensor, value: Tensor, families: Sequence[Sequence[int]], form: AttentionForm
) -> list[Tensor]:
    """Compute PyTorch's attention of each trunk and branch, (length, heads, dim) each."""
    outputs, start = [], 0
    for trunk, *branches in families:
        begin, start = start, start + trunk
        outputs.append(run_attention(query[begin:start], key[begin:start], value[begin:start], 1, trunk, form))
        for branch in branches:
            stop = start + branch
            keys, values = (torch.cat([x[begin : begin + trunk], x[start:stop]]) for x in (key, value))
            q, k, v = (x.transpose(0, 1)[None] for x in (query[start:stop], keys, values))
            if form.is_plain:
                seen = torch.ones(branch, trunk + branch, dtype=torch.bool, device=query.device).tril(trunk)
                out = pytorch_attention(q, k, v, form.scaling, seen)
            else:
                out = attention_by_form(q, k, v, form)
            outputs.append(out[0].transpose(0, 1))
            start = stop
    return outputs
