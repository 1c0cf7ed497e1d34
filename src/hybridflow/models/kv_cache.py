"""The KV cache of running sequences, and the attention plans that fill and read it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.models.attention import PackedPlan
from hybridflow.models.attention_form import AttentionForm, attention_up_to
from hybridflow.models.kernels.attention import append_and_attend
from hybridflow.models.kernels.library import serves
from hybridflow.models.recurrence import Recurrence, States


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of the first `length` tokens of a sequence, one tensor per layer: (tokens, kv_heads, dim).

    Of a layer with one of the `windows`, see KVCache, they are the places that the row of a cache has.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int
    windows: list[int | None]

    def __len__(self) -> int:
        return self.length


class KVCache:
    """Keys and values of the running sequences, one row each; `lengths` (rows,) counts their tokens.

    `keys` and `values` have one tensor per layer of attention: (rows, kv_heads, places, dim), contiguous; after rows
    were dropped, they are the first rows of a larger one. There is a place for each of `capacity` tokens, but at most
    as many as the layer's window: there token n is at place n % window, in the place of the one that left the window.
    Storage grows when rows are added that do not fit. `states`: those of recurrent layers by their number, which are of
    the last tokens of rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._storage: tuple[list[Tensor], list[Tensor]] = ([], [])  # of which keys and values are the first rows
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.states: dict[int, States] = {}
        self.capacity = 0  # tokens that fit into a row
        self._index: dict[int, int] = {}  # of layers with keys and values
        self._windows: list[int | None] = []  # of these layers

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, by its number in the model."""
        index = self._index.get(layer, layer)
        return self.keys[index], self.values[index]

    def append(self, prompts: "PrefillPlan", source: Tensor, capacity: int, room: int = 0) -> None:
        """Add one row for each entry of `source`, the index of the row's prompt.

        `capacity` is the largest number of tokens that one of these rows will have; it does not shrink. `room`: the
        number of rows that are added next, for which storage that grows has room.
        """
        layout = NewRows(prompts.lengths, source, first_row=len(self.lengths))
        self._index = {layer: index for index, layer in enumerate(prompts.keys)}
        self._windows = [prompts.forms[layer].window for layer in prompts.keys]
        packed = list(prompts.keys.values()), list(prompts.values.values())
        for number, states in prompts.states.items():
            old = self.states.get(number, States(number))
            self.states[number] = States.joined([old, states.of_rows(source)])
        self._add(layout.lengths, *packed, capacity, room)
        for layer in prompts.keys:
            self.write(layer, layout, prompts.keys[layer], prompts.values[layer])

    def append_known(
        self, known: Sequence[KeysValues], lengths: Sequence[int], source: Tensor, capacity: int, room: int = 0
    ) -> None:
        """Add one row for each entry of `source`, the index of its sequence in `known`.

        The row counts the `lengths` of its whole sequence; a ContinuedPlan writes the tokens that are not known. See
        `append`.
        """
        first, self._windows = len(self.lengths), known[0].windows
        self._add(torch.tensor(lengths, device=source.device)[source], known[0].keys, known[0].values, capacity, room)
        for row, i in enumerate(source.tolist(), first):
            for storage, old in ((self.keys, known[i].keys), (self.values, known[i].values)):
                for x, of_layer in zip(storage, old, strict=True):
                    x[row, :, : len(of_layer)] = of_layer.transpose(0, 1)

    def extend(self, first: int, lengths: Sequence[int], capacity: int, room: int = 0) -> None:
        """Let rows from `first` on have these lengths; a ContinuedPlan writes their further tokens. See `append`."""
        self._add(self.lengths[:0], *self._storage, capacity, room)
        self.lengths[first : first + len(lengths)] = torch.tensor(lengths, device=self.lengths.device)

    def write(self, layer: int, new: "NewRows", key: Tensor, value: Tensor) -> None:
        """Write keys and values (tokens, kv_heads, dim) of rows whose lengths count them, as far as windows reach."""
        rows, positions, tokens = new.rows, new.positions, new.tokens
        if (window := self._windows[self._index.get(layer, layer)]) is not None:
            is_last = positions >= self.lengths[rows] - window
            rows, positions, tokens = rows[is_last], positions[is_last] % window, tokens[is_last]
        for x, of_layer in zip(self.of_layer(layer), (key, value), strict=True):
            x.transpose(1, 2)[rows, positions] = of_layer[tokens]

    def row(self, row: int, length: int) -> KeysValues:
        """Copy the first `length` tokens of a row, which has no more."""
        keys, values = ([x[row, :, :length].clone().transpose(0, 1) for x in part] for part in (self.keys, self.values))
        return KeysValues(keys, values, length, self._windows)

    def keep(self, order: Sequence[int]) -> None:
        """Drop every row that is not listed, and move row order[i] to i. Only rows that move are copied."""
        rows = torch.tensor(order, dtype=torch.int64, device=self.lengths.device)
        used = int(self.lengths[rows].max()) if len(rows) else 0
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().flatten()
        for storage in (self.keys, self.values):
            for layer, x in enumerate(storage):
                if len(moved):
                    tokens = x[:, :, :used]
                    tokens.index_copy_(0, moved, tokens[rows[moved]])
                storage[layer] = x[: len(rows)]
        self.lengths = self.lengths[rows]
        self.states = {layer: states.of_rows(rows) for layer, states in self.states.items()}

    def _add(self, lengths: Tensor, keys: list[Tensor], values: list[Tensor], capacity: int, room: int) -> None:
        """Add rows of these lengths, for tensors like `keys` and `values`; storage that grows has room for more."""
        rows, self.capacity = len(self.lengths) + len(lengths), max(capacity, self.capacity)
        compiled = all(_is_compiled(key, value) for key, value in zip(keys, values, strict=True))
        places = [min(self.capacity, window or self.capacity) for window in self._windows]

        def grown(storage: list[Tensor], part: list[Tensor]) -> list[Tensor]:
            old = storage or [None] * len(part)
            layers = zip(old, part, places, strict=True)
            return [self._grown(x, of_layer, rows, room, count, compiled) for x, of_layer, count in layers]

        self._storage = grown(self._storage[0], keys), grown(self._storage[1], values)
        self.keys, self.values = ([x[:rows] for x in storage] for storage in self._storage)
        self.lengths = torch.cat([self.lengths, lengths])

    def _grown(self, storage: Tensor | None, like: Tensor, rows: int, room: int, places: int, compiled: bool) -> Tensor:
        """Return a layer's storage with room for `rows` of so many places, and if it must grow for `room` more."""
        if storage is not None and storage.shape[0] >= rows and storage.shape[2] >= places:
            return storage
        shape = (rows + room, like.shape[1], places, like.shape[-1])
        # PyTorch's attention multiplies unwritten entries by 0, so they must not be NaN.
        larger = like.new_empty(shape) if compiled else like.new_zeros(shape)
        if storage is not None and len(self.lengths):
            used = int(self.lengths.max())
            larger[: len(self.lengths), :, :used] = storage[: len(self.lengths), :, :used]
        return larger


class NewRows:
    """The layout of new rows: token `tokens[i]` of packed sequences goes to `rows[i]`, position `positions[i]`.

    `starts`: the positions of the first tokens of the sequences; all 0 by default.
    """

    def __init__(
        self, sequence_lengths: Sequence[int], source: Tensor, first_row: int, starts: Sequence[int] = ()
    ) -> None:
        sizes = torch.tensor(sequence_lengths, device=source.device)
        firsts = sizes.cumsum(0) - sizes
        self.lengths = sizes[source]
        row = torch.arange(len(source), device=source.device).repeat_interleave(self.lengths)
        ends = self.lengths.cumsum(0)
        self.positions = torch.arange(len(row), device=source.device) - (ends - self.lengths)[row]
        self.tokens = firsts[source][row] + self.positions
        self.rows = first_row + row
        if starts:
            self.positions = self.positions + torch.tensor(starts, device=source.device)[source][row]


def _is_compiled(keys: Tensor, values: Tensor) -> bool:
    """Whether a compiled kernel, which does not read unwritten entries, attends to these keys and values."""
    return serves(keys) and keys.shape[-1] == values.shape[-1]


class PrefillPlan:
    """Packed causal attention over prompts that also stores their keys and values.

    `keys` and `values` by layer: (tokens, kv_heads, dim) of the packed prompts, and the `forms` of attention. `states`
    by recurrent layer: after each prompt.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.forms: dict[int, AttentionForm] = {}
        self.states: dict[int, States] = {}
        self._packed = PackedPlan.from_lengths(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Store the keys and values of one layer, and compute its attention."""
        self.keys[layer], self.values[layer] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        self.forms[layer] = form
        return self._packed.attend(layer, query, key, value, form)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer, and store the states after each prompt."""
        out, self.states[layer] = self._packed.recur_with_states(layer, hidden, compute)
        return out


class DecodePlan:
    """Attention of one new token in each of the first `num_rows` rows, to all tokens of its row that its form allows.

    Its key and value are written at the end of the row. The caller adds 1 to the lengths of the rows that continue;
    entries of the other rows are overwritten or not read.
    """

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        self.cache = cache
        self.num_rows = num_rows
        self.ends = cache.lengths[:num_rows].clone()
        self.longest = int(self.ends.max())
        self._rows = torch.arange(num_rows, device=cache.lengths.device)
        self._unseen: dict[int, Tensor] = {}  # by the number of places

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write the new keys and values of one layer, and compute its attention.

        Where rows are longer than a window, its places hold what it sees, in an order that attention does not depend
        on.
        """
        keys, values = self.cache.of_layer(layer)
        used, places, last = self.longest + 1, self.ends, self.ends
        if form.window is not None:
            used, form = min(used, form.window), replace(form, window=None)
            places, last = self.ends % used, self.ends.clamp(max=used - 1)
        query, key, value = query[:, :, 0], key[:, :, 0], value[:, :, 0]
        is_compiled = form.is_plain and _is_compiled(key, value)
        if used <= self.longest or not is_compiled:
            keys[self._rows, :, places], values[self._rows, :, places] = key, value
        if is_compiled:
            if used <= self.longest:  # the kernel writes at the last place: what is there already
                key, value = keys[self._rows, :, last], values[self._rows, :, last]
            return append_and_attend(query, key, value, keys, values, last, used - 1, form.scaling).unsqueeze(1)
        keys, values = keys[: self.num_rows], values[: self.num_rows]
        if form.is_plain:
            return self._attend_by_products(query, keys, values, last, used, form.scaling).unsqueeze(1)
        keys, values = keys[:, :, :used], values[:, :, :used]
        return attention_up_to(query[:, :, None], keys, values, last[:, None], form).transpose(1, 2)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of the new tokens; their states take the place of those before."""
        return compute(hidden, self.cache.states[layer].of_rows(slice(self.num_rows)))

    def _attend_by_products(
        self, query: Tensor, keys: Tensor, values: Tensor, last: Tensor, used: int, scaling: float
    ) -> Tensor:
        """Compute attention by two matrix products on the first `used` places of rows, (rows, heads, dim)."""
        (rows, heads, head_dim), kv_heads = query.shape, keys.shape[1]
        grouped = (query * scaling).reshape(rows * kv_heads, heads // kv_heads, head_dim)
        scores = torch.bmm(grouped, keys.flatten(0, 1)[:, :used].mT).view(rows, heads, used)
        if used not in self._unseen:
            self._unseen[used] = torch.arange(used, device=last.device) > last[:, None]
        scores = scores.masked_fill_(self._unseen[used][:, None], -torch.inf)
        weights = scores.softmax(-1, dtype=None if scores.dtype == torch.float64 else torch.float32).to(scores.dtype)
        return torch.bmm(weights.view(rows * kv_heads, -1, used), values.flatten(0, 1)[:, :used]).view(rows, heads, -1)
