"""The KV cache of running sequences, and the attention plans that fill and read it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.kernels import append_and_attend, serves
from hybridflow.models.attention import PackedPlan


class KVCache:
    """Keys and values of the running sequences, one row each; `lengths` (rows,) counts their tokens.

    `keys` and `values` have one tensor per layer: (rows, kv_heads, capacity, dim), contiguous; after rows were dropped,
    they are the first rows of a larger one. Storage grows when rows are added that do not fit.
    """

    def __init__(self, device: torch.device) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._storage: tuple[list[Tensor], list[Tensor]] = ([], [])  # of which keys and values are the first rows
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        """The number of tokens that fit into a row."""
        return self.keys[0].shape[2] if self.keys else 0

    def append(self, prompts: "PrefillPlan", source: Tensor, capacity: int, room: int = 0) -> None:
        """Add one row for each entry of `source`, the index of the row's prompt.

        `capacity` is the largest number of tokens that one of these rows will have; it does not shrink. `room`: the
        number of rows that are added next, for which storage that grows has room.
        """
        capacity = max(capacity, self.capacity)
        layout = _NewRows(prompts.lengths, source, first_row=len(self.lengths))
        layers = range(len(prompts.keys))
        compiled = all(_is_compiled(prompts.keys[i], prompts.values[i]) for i in layers)
        size = (layout.first_row + len(layout.lengths), capacity, room)
        keys, values = (
            [self._grown(storage, i, packed[i], layout, size, compiled) for i in layers]
            for storage, packed in zip(self._storage, (prompts.keys, prompts.values), strict=True)
        )
        self._storage = keys, values
        self.keys, self.values = ([x[: size[0]] for x in storage] for storage in self._storage)
        self.lengths = torch.cat([self.lengths, layout.lengths])

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not listed, and move row rows[i] to i. Only rows that move are copied."""
        used = int(self.lengths[rows].max()) if len(rows) else 0
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().flatten()
        for storage in (self.keys, self.values):
            for layer, x in enumerate(storage):
                tokens = x[:, :, :used]
                tokens.index_copy_(0, moved, tokens[rows[moved]])
                storage[layer] = x[: len(rows)]
        self.lengths = self.lengths[rows]

    def _grown(
        self,
        storage: list[Tensor],
        layer: int,
        packed: Tensor,
        layout: "_NewRows",
        size: tuple[int, int, int],
        compiled: bool,
    ) -> Tensor:
        """Return storage with a layer's existing rows, then new rows filled from `packed` (tokens, kv_heads, dim).

        `size`: rows, tokens of each, and further rows if storage must grow.
        """
        (heads, dim), (rows, capacity, room) = packed.shape[1:], size
        grown = storage[layer] if storage else None
        if grown is None or grown.shape[0] < rows or grown.shape[2] < capacity:
            shape = (rows + room, heads, capacity, dim)
            # PyTorch's attention multiplies unwritten entries by 0, so they must not be NaN.
            larger = packed.new_empty(shape) if compiled else packed.new_zeros(shape)
            if grown is not None and layout.first_row:
                used = int(self.lengths.max())
                larger[: layout.first_row, :, :used] = grown[: layout.first_row, :, :used]
            grown = larger
        grown.transpose(1, 2)[layout.rows, layout.positions] = packed[layout.tokens]
        return grown


class _NewRows:
    """The layout of new rows: token `tokens[i]` of the packed prompts goes to `rows[i]`, position `positions[i]`."""

    def __init__(self, prompt_lengths: Sequence[int], source: Tensor, first_row: int) -> None:
        prompts = torch.tensor(prompt_lengths, device=source.device)
        starts = prompts.cumsum(0) - prompts
        self.first_row = first_row
        self.lengths = prompts[source]
        row = torch.arange(len(source), device=source.device).repeat_interleave(self.lengths)
        ends = self.lengths.cumsum(0)
        self.positions = torch.arange(len(row), device=source.device) - (ends - self.lengths)[row]
        self.tokens = starts[source][row] + self.positions
        self.rows = first_row + row


def _is_compiled(keys: Tensor, values: Tensor) -> bool:
    """Whether a compiled kernel, which does not read unwritten entries, attends to these keys and values."""
    return serves(keys) and keys.shape[-1] == values.shape[-1]


class PrefillPlan:
    """Packed causal attention over prompts that also stores their keys and values.

    `keys` and `values` by layer: (tokens, kv_heads, dim) of the packed prompts.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._packed = PackedPlan.from_lengths(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store the keys and values of one layer, and compute its attention."""
        self.keys[layer], self.values[layer] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        return self._packed.attend(layer, query, key, value, scaling)


class DecodePlan:
    """Attention of one new token in each of the first `num_rows` rows, to all tokens of its row.

    Its key and value are written at the end of the row. The caller adds 1 to the lengths of the rows that continue;
    entries of the other rows are overwritten or not read.
    """

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        self.cache = cache
        self.num_rows = num_rows
        self.ends = cache.lengths[:num_rows].clone()
        self.longest = int(self.ends.max())
        self._rows = torch.arange(num_rows, device=cache.lengths.device)
        self._unseen: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write the new keys and values of one layer, and compute its attention."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        query, key, value = query[:, :, 0], key[:, :, 0], value[:, :, 0]
        if _is_compiled(key, value):
            out = append_and_attend(query, key, value, keys, values, self.ends, self.longest, scaling)
            return out.unsqueeze(1)
        return self._attend_by_products(query, key, value, keys, values, scaling).unsqueeze(1)

    def _attend_by_products(
        self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        """Compute attention by two matrix products on the padded rows, (rows, heads, dim)."""
        keys[self._rows, :, self.ends] = key
        values[self._rows, :, self.ends] = value
        (rows, heads, head_dim), kv_heads, used = query.shape, key.shape[1], self.longest + 1
        grouped = (query * scaling).reshape(rows * kv_heads, heads // kv_heads, head_dim)
        scores = torch.bmm(grouped, keys[:rows].flatten(0, 1)[:, :used].mT).view(rows, heads, used)
        if self._unseen is None:
            self._unseen = torch.arange(used, device=self.ends.device) > self.ends[:, None]
        scores = scores.masked_fill_(self._unseen[:, None], -torch.inf)
        weights = scores.softmax(-1, dtype=None if scores.dtype == torch.float64 else torch.float32).to(scores.dtype)
        return torch.bmm(weights.view(rows * kv_heads, -1, used), values[:rows].flatten(0, 1)[:, :used]).view(
            rows, heads, -1
        )
