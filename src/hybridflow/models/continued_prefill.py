"""Attention plans of prompts whose first tokens have keys and values already: only the others are computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.kernels.paged_attention import append_to_pages, paged_attention
from hybridflow.models.attention import pytorch_attention
from hybridflow.models.kv_cache import KVCache, PrefillPlan
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache
from hybridflow.models.varlen import MAX_PADDED, PackedLayout, padded, unpadded

READ_POSITIONS = 2**20
"""Maximal number of places in pages that one call of attention reads, as PyTorch copies them."""


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of the first tokens of a sequence, one tensor per layer: (tokens, kv_heads, dim)."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of_row(cls, cache: KVCache, row: int, length: int) -> "KeysValues":
        """Copy the first `length` tokens of a row."""
        layers = (cache.keys, cache.values)
        return cls(*([x[row, :, :length].transpose(0, 1).clone() for x in part] for part in layers))


class ContinuedPlan(PrefillPlan):
    """Causal attention of packed new tokens to the known tokens of their sequence and to each other.

    `lengths` counts known and new tokens of each sequence, and `keys` and `values` are those of all of them, as in
    PrefillPlan. Each sequence has known tokens, and at least one new one. Consecutive sequences are one padded batch,
    as long as padding adds little.
    """

    def __init__(self, lengths: list[int], known: Sequence[KeysValues]) -> None:
        super().__init__(lengths)
        self._known = known
        self._counts = [length - len(each.keys[0]) for length, each in zip(lengths, known, strict=True)]
        device = known[0].keys[0].device
        self._batches = [_Batch.of(lengths[part], self._counts[part], device) for part in _parts(lengths, self._counts)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the keys and values of one layer, and compute its attention."""
        query, new_keys, new_values = (x[0].transpose(0, 1) for x in (query, key, value))
        known = ([each.keys[layer] for each in self._known], [each.values[layer] for each in self._known])
        self.keys[layer], self.values[layer] = (
            torch.cat([x for pair in zip(old, new.split(self._counts), strict=True) for x in pair])
            for old, new in zip(known, (new_keys, new_values), strict=True)
        )
        queries = query.split([len(batch.new.slots) for batch in self._batches])
        keys, values = (
            x.split([len(batch.whole.slots) for batch in self._batches]) for x in (self.keys[layer], self.values[layer])
        )
        outputs = []
        for batch, q, k, v in zip(self._batches, queries, keys, values, strict=True):
            q, k, v = padded(q, batch.new), padded(k, batch.whole), padded(v, batch.whole)
            outputs.append(unpadded(pytorch_attention(q, k, v, scaling, batch.seen), batch.new))
        return torch.cat(outputs)[None]


@dataclass(frozen=True)
class _Batch:
    """Sequences that are computed as a padded batch: all their tokens, the new ones, and the keys that these see."""

    whole: PackedLayout
    new: PackedLayout
    seen: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> "_Batch":
        starts = torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)], device=device)
        last = starts[:, None] + torch.arange(max(counts), device=device)  # the last key that a query sees
        seen = torch.arange(max(lengths), device=device) <= last[:, :, None]
        return cls(PackedLayout.of(lengths, device), PackedLayout.of(counts, device), seen[:, None])


def _parts(lengths: Sequence[int], counts: Sequence[int]) -> Iterator[slice]:
    """Yield consecutive sequences for which a padded batch has at most MAX_PADDED times their pairs of tokens."""
    first = pairs = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        part = slice(first, i + 1)
        if (i + 1 - first) * max(lengths[part]) * max(counts[part]) > MAX_PADDED * (pairs + length * count):
            yield slice(first, i)
            first, pairs = i, 0
        pairs += length * count
    yield slice(first, len(lengths))


class PagedContinuedPlan:
    """Causal attention of packed new tokens to all tokens before them in the pages of their sequence.

    Their keys and values are written first: those of token `tokens[i]` to slot `slots[i]`, (copies,) int64 each, as in
    PagedPrefillPlan. `tables` (tokens, pages) int32 are the pages of each new token's sequence; `counts` (tokens,)
    int64 is the number of tokens up to and including it.
    """

    def __init__(self, cache: PagedKVCache, tokens: Tensor, slots: Tensor, tables: Tensor, counts: Tensor) -> None:
        self._cache, self._tokens, self._slots, self._tables, self._counts = cache, tokens, slots, tables, counts
        self._size = max(1, READ_POSITIONS // (tables.shape[1] * PAGE_SIZE))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write the keys and values of one layer, and compute its attention."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        append_to_pages(key[self._tokens], value[self._tokens], keys, values, self._slots)
        parts = zip(*(x.split(self._size) for x in (query, self._tables, self._counts)), strict=True)
        return torch.cat([paged_attention(q, keys, values, table, count, scaling) for q, table, count in parts])[None]
