"""Attention plans of prompts whose first tokens have keys and values already: only the others are computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.kernels.paged_attention import append_to_pages, paged_attention
from hybridflow.models.attention import pytorch_attention
from hybridflow.models.kv_cache import KVCache, NewRows
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache
from hybridflow.models.varlen import MAX_PADDED, PackedLayout, padded, unpadded

READ_POSITIONS = 2**20
"""Maximal number of places in pages that one call of attention reads, as PyTorch copies them."""


class ContinuedPlan:
    """Causal attention of packed new tokens to all tokens before them in the cache row of their sequence.

    The rows of the cache from `first_row` on, one for each entry of `source`, are those that `KVCache.append_known` or
    `extend` has made: of sequence i they know `starts[i]` of `lengths[i]` tokens, at least one less. Keys and values of
    new tokens are written first. Consecutive sequences are one padded batch, as long as padding adds little.
    """

    def __init__(
        self, cache: KVCache, first_row: int, source: Tensor, lengths: Sequence[int], starts: Sequence[int]
    ) -> None:
        counts, device = [length - start for length, start in zip(lengths, starts, strict=True)], source.device
        self._cache, self._new = cache, NewRows(counts, source, first_row)
        self._positions = self._new.positions + torch.tensor(starts, device=device)[source][self._new.rows - first_row]
        own_row = first_row + torch.searchsorted(source, torch.arange(len(counts), device=device))
        self._batches = [
            _Batch.of(own_row[part], lengths[part], counts[part], device) for part in _parts(lengths, counts)
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write the keys and values of one layer, and compute its attention."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        keys, values, new = self._cache.keys[layer], self._cache.values[layer], self._new
        for rows, x in ((keys, key), (values, value)):
            rows.transpose(1, 2)[new.rows, self._positions] = x[new.tokens]
        queries = query.split([len(batch.new.slots) for batch in self._batches])
        outputs = []
        for batch, q in zip(self._batches, queries, strict=True):
            k, v = (x[batch.rows, :, : batch.longest] for x in (keys, values))
            outputs.append(unpadded(pytorch_attention(padded(q, batch.new), k, v, scaling, batch.seen), batch.new))
        return torch.cat(outputs)[None]


@dataclass(frozen=True)
class _Batch:
    """Sequences that are computed as a padded batch: their rows and new tokens, and which keys these see."""

    rows: slice | Tensor
    longest: int
    new: PackedLayout
    seen: Tensor

    @classmethod
    def of(cls, rows: Tensor, lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> "_Batch":
        starts = torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)], device=device)
        last = starts[:, None] + torch.arange(max(counts), device=device)  # the last key that a query sees
        seen = torch.arange(max(lengths), device=device) <= last[:, :, None]
        first, end = int(rows[0]), int(rows[-1]) + 1
        one_each = end - first == len(rows)
        return cls(
            slice(first, end) if one_each else rows, max(lengths), PackedLayout.of(counts, device), seen[:, None]
        )


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
