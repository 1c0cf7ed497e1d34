"""Attention plans of prompts whose first tokens have keys and values already: only the others are computed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybridflow.models.attention import pytorch_attention
from hybridflow.models.attention_backend import AttentionCase, supports_flash
from hybridflow.models.attention_form import AttentionForm, attention_up_to
from hybridflow.models.kernels.exact import attend
from hybridflow.models.kernels.paged_attention import append_to_pages, paged_attention
from hybridflow.models.kv_cache import KVCache, NewRows
from hybridflow.models.paged_kv_cache import PAGE_SIZE, PagedKVCache
from hybridflow.models.varlen import MAX_PADDED, PackedLayout, padded, unpadded, upload, varlen_attention

COPIED_BYTES = 2**28
"""Maximal memory of the keys and values that one call of attention copies out of their pages; one sequence is copied
whole."""

MAX_PAIRS = 2**24
"""Maximal number of pairs of tokens in one padded batch, whose mask has an entry for each; one sequence is computed
whole."""


class ContinuedPlan:
    """Causal attention of packed new tokens to all tokens before them in the cache row of their sequence.

    The rows of the cache from `first_row` on, one for each entry of `source`, are those that `KVCache.append_known` or
    `extend` has made: of sequence i they know `starts[i]` of `lengths[i]` tokens, at least one less. Consecutive
    sequences are one padded batch, as long as padding adds little.
    """

    def __init__(
        self, cache: KVCache, first_row: int, source: Tensor, lengths: Sequence[int], starts: Sequence[int]
    ) -> None:
        counts, device = [length - start for length, start in zip(lengths, starts, strict=True)], source.device
        self._cache, self._new = cache, NewRows(counts, source, first_row, starts)
        own_row = first_row + torch.searchsorted(source, torch.arange(len(counts), device=device))
        self._rows = own_row.repeat_interleave(torch.tensor(counts, device=device))  # of each new token
        self._num_keys = torch.cat([torch.arange(s, e) for s, e in zip(starts, lengths, strict=True)]).to(device) + 1
        self._parts = [(own_row[part], lengths[part], counts[part]) for part in _parts(lengths, counts)]
        self._longest = max(lengths)
        self._batches: dict[int | None, list[_PrefillBatch]] = {}  # by window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute the attention of one layer, and write its new keys and values."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        form, (keys, values) = form.within(self._longest), self._cache.of_layer(layer)
        if form.exact:
            self._cache.write(layer, self._new, key, value)
            heads = {"kv_heads": keys.shape[1], "places": keys.shape[2]}
            first_keys = self._rows * keys[0, :, :, 0].numel()
            return attend(query, keys, values, first_keys, self._num_keys, form.scaling, **heads)[0][None]
        if form.window not in self._batches:
            self._batches[form.window] = [_PrefillBatch.of(*part, form.window) for part in self._parts]
        counts = [sum(part) for _, _, part in self._parts]
        new = zip(query.split(counts), key.split(counts), value.split(counts), strict=True)
        batches = zip(self._batches[form.window], new, strict=True)
        outputs = [batch.attend(q, k, v, keys, values, form) for batch, (q, k, v) in batches]
        self._cache.write(layer, self._new, key, value)  # where a window has places, in those of tokens read above
        return torch.cat(outputs)[None]


@dataclass(frozen=True)
class _PrefillBatch:
    """Sequences that are computed as a padded batch: which keys their new tokens see, and where these are.

    The token `before.tokens[i]` that the new ones see is at `places[i]` of row `rows[i]` of the cache. It and the new
    ones go to the rows and positions of `before` and `new` in the batch.
    """

    rows: Tensor
    places: Tensor
    before: NewRows
    new: NewRows
    layout: PackedLayout
    seen: "_Seen"

    @classmethod
    def of(cls, rows: Tensor, lengths: Sequence[int], counts: Sequence[int], window: int | None) -> "_PrefillBatch":
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        known = [start if window is None else min(start, window - 1) for start in starts]
        each = torch.arange(len(rows), device=rows.device)
        before, new = NewRows(known, each, 0), NewRows(counts, each, 0, known)
        places = before.positions
        if window is not None:
            first = [start - count for start, count in zip(starts, known, strict=True)]
            places = (places + torch.tensor(first, device=rows.device)[before.rows]) % window
        whole = [a + b for a, b in zip(known, counts, strict=True)]
        layout, seen = PackedLayout.of(counts, rows.device), _Seen(whole, counts, rows.device)
        return cls(rows[before.rows], places, before, new, layout, seen)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, form: AttentionForm
    ) -> Tensor:
        """Compute attention of new tokens (tokens, heads, dim) to the rows of a layer's cache and to their own."""
        key, value = self._joined(keys, key), self._joined(values, value)
        return unpadded(_attention(padded(query, self.layout), key, value, self.seen, form), self.layout)

    def _joined(self, cached: Tensor, new: Tensor) -> Tensor:
        """Return keys or values of the batch, (sequences, kv_heads, longest, dim), with zeros after the last ones."""
        joined = new.new_zeros(len(self.seen.last), new.shape[1], self.seen.longest, new.shape[2])
        joined.transpose(1, 2)[self.before.rows, self.before.positions] = cached.transpose(1, 2)[self.rows, self.places]
        joined.transpose(1, 2)[self.new.rows, self.new.positions] = new
        return joined


class PagedContinuedPlan:
    """Causal attention of packed new tokens to all tokens before them in the pages of their sequence.

    Their keys and values are written first: those of token `tokens[i]` to slot `slots[i]`, (copies,) int64 each, as in
    PagedPrefillPlan. Sequence i has `lengths[i]` tokens in `pages[i]`, of which the last `counts[i]` are new, at least
    one.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        tokens: Tensor,
        slots: Tensor,
        pages: Sequence[Sequence[int]],
        lengths: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        self._cache, self._tokens, self._slots = cache, tokens, slots
        self._pages, self._lengths, self._counts = pages, lengths, counts
        self._batches: list[_PagedBatch] = []  # made in the first layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write the keys and values of one layer, and compute its attention."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        keys, values, addresses = self._cache.of_layer(layer)
        append_to_pages(key[self._tokens], value[self._tokens], keys, values, self._slots, addresses)
        if form.exact:
            return paged_attention(query, keys, values, *self._tables, form.scaling, addresses, exact=True)[None]
        self._batches = self._batches or list(self._split(query, key, value))
        queries = query.split([len(batch.new.slots) for batch in self._batches])
        outputs = []
        for batch, q in zip(self._batches, queries, strict=True):
            k, v = (x.flatten(0, 1)[batch.read] for x in (keys, values))
            outputs.append(batch.attend(q, k, v, form))
        return torch.cat(outputs)[None]

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """The page table of each new token, and how many tokens it sees."""
        tables = np.zeros((len(self._pages), max(map(len, self._pages))), dtype=np.int32)
        for table, pages in zip(tables, self._pages, strict=True):
            table[: len(pages)] = pages
        ends = zip(self._lengths, self._counts, strict=True)
        counts = np.concatenate([np.arange(length - count, length) + 1 for length, count in ends])
        device = self._tokens.device
        return upload(np.repeat(tables, self._counts, axis=0), device), upload(counts, device)

    def _split(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator["_PagedBatch"]:
        is_flash = supports_flash(AttentionCase.of(query, key, value))
        copies = 1 if is_flash else MAX_PADDED * query.shape[1] // key.shape[1]  # padded, and one for each query head
        bytes_per_token = copies * sum(x[0].numel() * x.element_size() for x in (key, value))
        most = max(1, COPIED_BYTES // bytes_per_token)
        for part in _parts(self._lengths, self._counts, most, is_padded=not is_flash):
            yield _PagedBatch.of(self._pages[part], self._lengths[part], self._counts[part], query.device, is_flash)


@dataclass(frozen=True)
class _PagedBatch:
    """Sequences of one call of attention: their new and all tokens, the slots of these, and which keys queries see.

    `is_flash`: flash attention computes it without padding, if the form of the layer allows that.
    """

    new: PackedLayout
    whole: PackedLayout
    read: Tensor
    seen: "_Seen"
    is_flash: bool

    @classmethod
    def of(
        cls,
        pages: Sequence[Sequence[int]],
        lengths: Sequence[int],
        counts: Sequence[int],
        device: torch.device,
        is_flash: bool,
    ) -> "_PagedBatch":
        slots = [
            (np.array(of_one)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).ravel()[:length]
            for of_one, length in zip(pages, lengths, strict=True)
        ]
        layouts = PackedLayout.of(counts, device), PackedLayout.of(lengths, device)
        read = upload(np.concatenate(slots), device)
        return cls(*layouts, read, _Seen(lengths, counts, device), is_flash)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute attention of queries (new tokens, heads, dim) to keys and values (all tokens, kv_heads, dim)."""
        if self.is_flash and (form.is_plain or form.is_windowed):
            places = {"keys": self.whole, "window": form.window}
            return varlen_attention(query, key, value, self.new, form.scaling, **places)
        key, value = (padded(x, self.whole) for x in (key, value))
        return unpadded(_attention(padded(query, self.new), key, value, self.seen, form), self.new)


class _Seen:
    """Which keys the new tokens of padded sequences see: those up to `last`, (sequences, most new tokens)."""

    def __init__(self, lengths: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        starts = torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)], device=device)
        self.last = starts[:, None] + torch.arange(max(counts), device=device)
        self.longest = max(lengths)

    @cached_property
    def mask(self) -> Tensor:
        """The same as (sequences, 1, most new tokens, longest) bool, made for the first layer that needs it."""
        return (torch.arange(self.longest, device=self.last.device) <= self.last[:, :, None])[:, None]


def _attention(query: Tensor, key: Tensor, value: Tensor, seen: _Seen, form: AttentionForm) -> Tensor:
    form = form.within(key.shape[2])
    if form.is_plain:
        return pytorch_attention(query, key, value, form.scaling, seen.mask)
    return attention_up_to(query, key, value, seen.last, form)


def _parts(
    lengths: Sequence[int], counts: Sequence[int], max_tokens: float = math.inf, *, is_padded: bool = True
) -> Iterator[slice]:
    """Yield consecutive sequences of at most `max_tokens` tokens, or a single one.

    If they are padded, they have at most MAX_PAIRS pairs of tokens, and at most MAX_PADDED times those without padding.
    """
    first = longest = most = pairs = tokens = 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        longest, most = max(longest, length), max(most, count)
        computed = (i + 1 - first) * longest * most
        is_wide = computed > min(MAX_PAIRS, MAX_PADDED * (pairs + length * count))
        if i > first and ((is_padded and is_wide) or tokens + length > max_tokens):
            yield slice(first, i)
            first, longest, most, pairs, tokens = i, length, count, 0, 0
        pairs += length * count
        tokens += length
    yield slice(first, len(lengths))
