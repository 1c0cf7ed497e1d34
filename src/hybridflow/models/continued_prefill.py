"""Attention plans of prompts whose first tokens have keys and values already: only the others are computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.kernels.paged_attention import append_to_pages, paged_attention
from hybridflow.models.attention import pytorch_attention
from hybridflow.models.kv_cache import KVCache, PrefillPlan
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache

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
    PrefillPlan. Each sequence has known tokens, and at least one new one.
    """

    def __init__(self, lengths: list[int], known: Sequence[KeysValues]) -> None:
        super().__init__(lengths)
        self._known = known
        self._seen: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the keys and values of one layer, and compute its attention."""
        starts = [len(known.keys[layer]) for known in self._known]
        counts = [length - start for length, start in zip(self.lengths, starts, strict=True)]
        queries, new_keys, new_values = (x[0].transpose(0, 1).split(counts) for x in (query, key, value))
        keys = [torch.cat([known.keys[layer], new]) for known, new in zip(self._known, new_keys, strict=True)]
        values = [torch.cat([known.values[layer], new]) for known, new in zip(self._known, new_values, strict=True)]
        self._seen = self._seen or [
            torch.ones(count, start + count, dtype=torch.bool, device=query.device).tril(start)
            for count, start in zip(counts, starts, strict=True)
        ]
        outputs = []
        for q, k, v, seen in zip(queries, keys, values, self._seen, strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            outputs.append(pytorch_attention(q, k, v, scaling, seen)[0].transpose(0, 1))
        self.keys[layer], self.values[layer] = torch.cat(keys), torch.cat(values)
        return torch.cat(outputs)[None]


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
