"""The mathematics of a layer's attention, and its reference computation for every form of it.

Most layers are plain: each query sees all keys up to its own, and kernels compute them. A sliding window, soft-capped
scores and attention sinks are computed here, in blocks of queries, so that memory grows with the tokens of a sequence
and not with their pairs.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK = 512
"""Queries that are computed at once. The weights of a block are computed again in the backward pass."""


@dataclass(frozen=True)
class AttentionForm:
    """The attention of one layer: softmax(scaling * query key^T) value, and what a family adds to it.

    `window`: a query sees this many keys, its own included. `softcap`: scores become softcap * tanh(score / softcap).
    `sinks` (heads,): the logit of a key without a value (GPT-OSS). `exact`: add in the order of decoding.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    exact: bool = False

    def within(self, longest: int) -> "AttentionForm":
        """Return the form for sequences of at most `longest` tokens, which a longer window does not limit."""
        return replace(self, window=None) if self.window is not None and self.window >= longest else self

    @property
    def is_windowed(self) -> bool:
        """Whether a window is all that makes it different."""
        return self.window is not None and self.softcap is None and self.sinks is None

    @property
    def is_plain(self) -> bool:
        """Whether each query sees all keys up to its own, by the scores alone."""
        return self.window is None and self.softcap is None and self.sinks is None

    def of_heads(self, part: int, parts: int, padded: int) -> "AttentionForm":
        """Return the form for one of `parts` equal parts of the query heads, after padding these to `padded`."""
        if self.sinks is None:
            return self
        sinks = torch.nn.functional.pad(self.sinks, (0, padded - len(self.sinks)))
        return replace(self, sinks=sinks.chunk(parts)[part])


def attention_by_form(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """Compute the attention of the last tokens of sequences, (batch, heads, queries, value_dim), in any form.

    query (batch, heads, queries, dim); key and value (batch, kv_heads, keys, dim or value_dim) of at least as many
    tokens, the last of which is the last query's own.
    """
    num_keys, num_queries = key.shape[2], query.shape[2]
    outputs = []
    for start in range(0, num_queries, BLOCK):
        block = query[:, :, start : start + BLOCK]
        first, end = num_keys - num_queries + start, num_keys - num_queries + start + block.shape[2]
        begin = 0 if form.window is None else max(0, first - form.window + 1)
        last = torch.arange(first - begin, end - begin, device=query.device)[None]
        compute = partial(attention_up_to, last=last, form=form)
        if num_queries > BLOCK and torch.is_grad_enabled():
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        outputs.append(compute(block, key[:, :, begin:end], value[:, :, begin:end]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def attention_up_to(query: Tensor, key: Tensor, value: Tensor, last: Tensor, form: AttentionForm) -> Tensor:
    """Compute attention, where each query sees the keys up to `last`, (batch or 1, queries), the window's part of them.

    See `attention_by_form`. Keys and values after `last` are not read.
    """
    dtype, (batch, heads, _, _), kv_heads = query.dtype, query.shape, key.shape[1]
    if query.device.type == "cpu":
        query, key, value = (x if x.dtype == torch.float64 else x.float() for x in (query, key, value))
    keys = torch.arange(key.shape[2], device=query.device)
    unseen = keys > last[..., None]  # (batch or 1, queries, keys)
    value = value.masked_fill(unseen.all(1)[:, None, :, None], 0.0)  # places that were never written may hold NaN
    if form.window is not None:
        unseen = unseen | (keys <= last[..., None] - form.window)
    grouped = (query * form.scaling).reshape(batch, kv_heads, -1, query.shape[-1])
    scores = (grouped @ key.mT).view(batch, heads, -1, key.shape[2])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    scores = scores.masked_fill(unseen[:, None], -torch.inf)
    if form.sinks is not None:
        sinks = form.sinks.to(scores.dtype)[:, None, None].expand(batch, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    out = weights.reshape(batch, kv_heads, -1, key.shape[2]) @ value
    return out.view(batch, heads, -1, value.shape[-1]).to(dtype)
