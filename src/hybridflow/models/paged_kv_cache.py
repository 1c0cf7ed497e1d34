"""Keys and values in pages, so that memory follows the real lengths of sequences, and the plans that use them.

The host assigns pages; the device reads each row's pages from a table. Responses of a group share the whole pages of
their prompt.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hybridflow.models.attention import PackedPlan
from hybridflow.models.attention_form import AttentionForm, attention_up_to
from hybridflow.models.kernels.paged_attention import PAGE_SIZE as PAGE_SIZE  # also for those who make pages
from hybridflow.models.kernels.paged_attention import append_to_pages, looks_up_addresses, paged_attention
from hybridflow.models.kv_cache import PrefillPlan
from hybridflow.models.recurrence import Recurrence
from hybridflow.models.varlen import upload


def pages_of(tokens: int) -> int:
    """Return the number of pages that hold this many tokens."""
    return -(-tokens // PAGE_SIZE)


class PageTable:
    """The free and used pages, on the host; several sequences may use one page."""

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self._free = list(range(first + count - 1, first - 1, -1))
        self._users: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """The number of pages without a user."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` free pages, each with one user; at most `num_free`."""
        pages = [self._free.pop() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add one user to each page, and return the pages."""
        for page in pages:
            self._users[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Remove one user of each page; a page without users is free."""
        for page in pages:
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                self._free.append(page)


class PagedKVCache:
    """Keys and values by layer of attention, (pages, PAGE_SIZE, kv_heads, dim), of the shapes and dtype of `like`.

    `like` is a plan that has computed one token. The first `num_scratch` pages are written by rows that do not run, and
    never read by others. `addresses` (layers, 2): where the keys and values of each layer are, in memory of a fixed
    address if `addresses_in` is given. `states`: those of recurrent layers, of `num_rows` rows in order.
    """

    def __init__(
        self,
        like: PrefillPlan,
        num_pages: int,
        num_scratch: int,
        addresses_in: Tensor | None = None,
        num_rows: int = 0,
    ) -> None:
        def allocated(x: Tensor) -> Tensor:
            return x.new_empty(num_scratch + num_pages, PAGE_SIZE, *x.shape[1:])

        self.keys = [allocated(x) for x in like.keys.values()]
        self.values = [allocated(x) for x in like.values.values()]
        self.num_rows = num_rows
        self.states = {layer: states.rows_like(num_rows) for layer, states in like.states.items()}
        self._index = {layer: index for index, layer in enumerate(like.keys)}
        pairs = list(zip(self.keys, self.values, strict=True))
        pages = [[x.data_ptr() for x in pair] for pair in pairs]
        tensors = [*self.keys, *(x for states in self.states.values() for x in states.tensors.values())]
        addresses = torch.tensor(pages, device=tensors[0].device)
        self.addresses = addresses if addresses_in is None else addresses_in.copy_(addresses)
        self.table = PageTable(num_scratch, num_pages)
        # What a CUDA graph of a decoding step expects unchanged: no pages if the kernels look the addresses up.
        is_fixed = not all(form.is_plain for form in like.forms.values())
        is_fixed = is_fixed or not all(looks_up_addresses(*pair) for pair in pairs)
        self.fixed_addresses = [num_scratch + num_pages, *chain.from_iterable(pages)] if is_fixed else []
        self.fixed_addresses += [x.data_ptr() for states in self.states.values() for x in states.tensors.values()]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and their addresses of a layer, by its number in the model."""
        index = self._index[layer]
        return self.keys[index], self.values[index], self.addresses[index]

    def reset_states(self, rows: Sequence[int]) -> None:
        """Let rows have no tokens in recurrent layers."""
        for states in self.states.values():
            states.write(upload(np.array(rows, dtype=np.int64), self.addresses.device), None)

    def move_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states of rows to other rows."""
        for states in self.states.values():
            source, target = (upload(np.array(rows), self.addresses.device) for rows in (sources, targets))
            states.write(target, states.of_rows(source))

    def copy_page(self, source: int, targets: Sequence[int]) -> None:
        """Copy the keys and values of a page to other pages."""
        if targets:
            index = upload(np.array(targets), self.keys[0].device)
            for x in (*self.keys, *self.values):
                x[index] = x[source].clone()

    @staticmethod
    def page_bytes(like: PrefillPlan) -> int:
        """Return the memory of one page in all layers, in bytes."""
        tensors = (*like.keys.values(), *like.values.values())
        return PAGE_SIZE * sum(x[0].numel() * x.element_size() for x in tensors)


class PagedPrefillPlan:
    """Packed causal attention over prompts that writes their keys and values into pages, and their states into rows.

    Token `tokens[i]` of the packed prompts goes to slot `slots[i]` (page * PAGE_SIZE + place), (copies,) int64 each.
    The states after prompt `prompts[i]` are those of row `rows[i]`, (rows,) int64 each.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        lengths: Sequence[int],
        tokens: Tensor,
        slots: Tensor,
        prompts: Tensor,
        rows: Tensor,
    ) -> None:
        self._cache, self._tokens, self._slots, self._prompts, self._rows = cache, tokens, slots, prompts, rows
        self._packed = PackedPlan.from_lengths(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write the keys and values of one layer, and compute its attention."""
        new_key, new_value = (x[0].transpose(0, 1)[self._tokens] for x in (key, value))
        keys, values, addresses = self._cache.of_layer(layer)
        append_to_pages(new_key, new_value, keys, values, self._slots, addresses)
        return self._packed.attend(layer, query, key, value, form)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer, and write the states."""
        out, states = self._packed.recur_with_states(layer, hidden, compute)
        self._cache.states[layer].write(self._rows, states.of_rows(self._prompts))
        return out


class PagedDecodePlan:
    """Attention of one new token in each row, to all tokens of its row.

    tables: (rows, pages) int32; ends: (rows,) int64, the numbers of tokens before the new one; running: (rows,) bool.
    Rows that do not run write to scratch pages, and their outputs are unused. All shapes are fixed, and no value is
    read by the host.
    """

    def __init__(self, cache: PagedKVCache, tables: Tensor, ends: Tensor, running: Tensor) -> None:
        self._cache, self._tables = cache, tables
        self.ends = ends * running
        self._counts = self.ends + 1
        page = tables.gather(1, self.ends[:, None] // PAGE_SIZE).squeeze(1)
        slot = page * PAGE_SIZE + self.ends % PAGE_SIZE
        self._slots = torch.where(running, slot, torch.arange(len(ends), device=ends.device))
        self._windows: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write the new keys and values of one layer, and compute its attention."""
        keys, values, addresses = self._cache.of_layer(layer)
        append_to_pages(key[:, :, 0], value[:, :, 0], keys, values, self._slots, addresses)
        form = form.within(self._tables.shape[1] * PAGE_SIZE)
        if form.is_plain:
            rows = (self._tables, self._counts, form.scaling, addresses)
            return paged_attention(query[:, :, 0], keys, values, *rows, exact=form.exact).unsqueeze(1)
        tables, last = self._last_pages(form.window)
        keys, values = (x[tables.long()].flatten(1, 2).transpose(1, 2) for x in (keys, values))
        return attention_up_to(query, keys, values, last[:, None], form).transpose(1, 2)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of the new tokens; those of rows that do not run change states that are unused."""
        return compute(hidden, self._cache.states[layer].of_rows(slice(len(self.ends))))

    def _last_pages(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the pages of each row that a window may reach, and the place of the new token in them."""
        width = self._tables.shape[1]
        if window is None or (count := pages_of(window + PAGE_SIZE - 1)) >= width:
            return self._tables, self.ends
        if window not in self._windows:
            first = (self.ends + 1 - window).clamp(min=0) // PAGE_SIZE
            columns = (first[:, None] + torch.arange(count, device=first.device)).clamp(max=width - 1)
            self._windows[window] = self._tables.gather(1, columns), self.ends - first * PAGE_SIZE
        return self._windows[window]
