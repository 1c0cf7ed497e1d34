"""The KV cache of running sequences, and the attention plans that fill and read it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models.attention import PackedPlan
from hybridflow.models.attention_form import AttentionForm, attention_up_to
from hybridflow.models.kernels.attention import append_and_attend
from hybridflow.models.kernels.library import serves
from hybridflow.models.recurrence import Recurrence, States


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of the first tokens of a sequence, one tensor per layer: (tokens, kv_heads, dim)."""

    keys: list[Tensor]
    values: list[Tensor]

    def __len__(self) -> int:
        return len(self.keys[0])


class KVCache:
    """Keys and values of the running sequences, one row each; `lengths` (rows,) counts their tokens.

    `keys` and `values` have one tensor per layer of attention: (rows, kv_heads, capacity, dim), contiguous; after rows
    were dropped, they are the first rows of a larger one. Storage grows when rows are added that do not fit. `states`:
    those of recurrent layers by their number, which are of the last tokens of rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._storage: tuple[list[Tensor], list[Tensor]] = ([], [])  # of which keys and values are the first rows
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.states: dict[int, States] = {}
        self._places: dict[int, int] = {}  # of layers with keys and values

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, by its number in the model."""
        place = self._places.get(layer, layer)
        return self.keys[place], self.values[place]

    @property
    def capacity(self) -> int:
        """The number of tokens that fit into a row."""
        return self.keys[0].shape[2] if self.keys else 0

    def append(self, prompts: "PrefillPlan", source: Tensor, capacity: int, room: int = 0) -> None:
        """Add one row for each entry of `source`, the index of the row's prompt.

        `capacity` is the largest number of tokens that one of these rows will have; it does not shrink. `room`: the
        number of rows that are added next, for which storage that grows has room.
        """
        layout = NewRows(prompts.lengths, source, first_row=len(self.lengths))
        self._places = {layer: place for place, layer in enumerate(prompts.keys)}
        packed = KeysValues(list(prompts.keys.values()), list(prompts.values.values()))
        for number, states in prompts.states.items():
            old = self.states.get(number, States(number))
            self.states[number] = States.joined([old, states.of_rows(source)])
        self._add(layout.lengths, packed, capacity, room)
        for storage, new in ((self.keys, packed.keys), (self.values, packed.values)):
            for x, of_layer in zip(storage, new, strict=True):
                x.transpose(1, 2)[layout.rows, layout.positions] = of_layer[layout.tokens]

    def append_known(
        self, known: Sequence[KeysValues], lengths: Sequence[int], source: Tensor, capacity: int, room: int = 0
    ) -> None:
        """Add one row for each entry of `source`, the index of its sequence in `known`.

        The row counts the `lengths` of its whole sequence; a ContinuedPlan writes the tokens that are not known. See
        `append`.
        """
        first = len(self.lengths)
        self._add(torch.tensor(lengths, device=source.device)[source], known[0], capacity, room)
        for row, i in enumerate(source.tolist(), first):
            for storage, old in ((self.keys, known[i].keys), (self.values, known[i].values)):
                for x, of_layer in zip(storage, old, strict=True):
                    x[row, :, : len(of_layer)] = of_layer.transpose(0, 1)

    def extend(self, first: int, lengths: Sequence[int], capacity: int, room: int = 0) -> None:
        """Let rows from `first` on have these lengths; a ContinuedPlan writes their further tokens. See `append`."""
        self._add(self.lengths[:0], KeysValues(*self._storage), capacity, room)
        self.lengths[first : first + len(lengths)] = torch.tensor(lengths, device=self.lengths.device)

    def row(self, row: int, length: int) -> KeysValues:
        """Copy the first `length` tokens of a row."""
        return KeysValues(
            *([x[row, :, :length].clone().transpose(0, 1) for x in part] for part in (self.keys, self.values))
        )

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

    def _add(self, lengths: Tensor, like: KeysValues, capacity: int, room: int) -> None:
        """Add rows of these lengths, for keys and values `like` these; storage that grows has room for `room` more."""
        rows, capacity = len(self.lengths) + len(lengths), max(capacity, self.capacity)
        compiled = all(_is_compiled(key, value) for key, value in zip(like.keys, like.values, strict=True))

        def grown(storage: list[Tensor], part: list[Tensor]) -> list[Tensor]:
            old = storage or [None] * len(part)
            return [
                self._grown(x, of_layer, rows, room, capacity, compiled) for x, of_layer in zip(old, part, strict=True)
            ]

        self._storage = grown(self._storage[0], like.keys), grown(self._storage[1], like.values)
        self.keys, self.values = ([x[:rows] for x in storage] for storage in self._storage)
        self.lengths = torch.cat([self.lengths, lengths])

    def _grown(
        self, storage: Tensor | None, like: Tensor, rows: int, room: int, capacity: int, compiled: bool
    ) -> Tensor:
        """Return a layer's storage with room for `rows` of `capacity` tokens, and if it must grow for `room` more."""
        if storage is not None and storage.shape[0] >= rows and storage.shape[2] >= capacity:
            return storage
        shape = (rows + room, like.shape[1], capacity, like.shape[-1])
        # PyTorch's attention multiplies unwritten entries by 0, so they must not be NaN.
        larger = like.new_empty(shape) if compiled else like.new_zeros(shape)
        if storage is not None and len(self.lengths):
            used = int(self.lengths.max())
            larger[: len(self.lengths), :, :used] = storage[: len(self.lengths), :, :used]
        return larger


class NewRows:
    """The layout of new rows: token `tokens[i]` of packed sequences goes to `rows[i]`, position `positions[i]`."""

    def __init__(self, sequence_lengths: Sequence[int], source: Tensor, first_row: int) -> None:
        sizes = torch.tensor(sequence_lengths, device=source.device)
        starts = sizes.cumsum(0) - sizes
        self.lengths = sizes[source]
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

    `keys` and `values` by layer: (tokens, kv_heads, dim) of the packed prompts. `states` by recurrent layer: after each
    prompt.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.states: dict[int, States] = {}
        self._packed = PackedPlan.from_lengths(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Store the keys and values of one layer, and compute its attention."""
        self.keys[layer], self.values[layer] = key[0].transpose(0, 1), value[0].transpose(0, 1)
        return self._packed.attend(layer, query, key, value, form)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer run by run, without padding, which would be in the states, and store these."""
        runs, rows, states = self._packed.runs, list[Tensor](), list[States]()
        for x, run in zip(hidden[0].split([count * length for count, length in runs]), runs, strict=True):
            states.append(States(layer))
            rows.append(compute(x.unflatten(0, run), states[-1]).flatten(0, 1))
        self.states[layer] = States.joined(states)
        return torch.cat(rows)[None]


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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write the new keys and values of one layer, and compute its attention."""
        keys, values = self.cache.of_layer(layer)
        form, used = form.within(self.longest + 1), self.longest + 1
        if not form.is_plain:
            for rows, x in ((keys, key), (values, value)):
                rows[self._rows, :, self.ends] = x[:, :, 0]
            keys, values = (x[: self.num_rows, :, :used] for x in (keys, values))
            return attention_up_to(query, keys, values, self.ends[:, None], form).transpose(1, 2)
        query, key, value, scaling = query[:, :, 0], key[:, :, 0], value[:, :, 0], form.scaling
        if _is_compiled(key, value):
            out = append_and_attend(query, key, value, keys, values, self.ends, self.longest, scaling)
            return out.unsqueeze(1)
        return self._attend_by_products(query, key, value, keys, values, scaling).unsqueeze(1)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        """Compute a recurrent layer of the new tokens; their states take the place of those before."""
        return compute(hidden, self.cache.states[layer].of_rows(slice(self.num_rows)))

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
