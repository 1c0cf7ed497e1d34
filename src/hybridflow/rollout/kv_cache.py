"""The keys and values of running sequences, and the attention plans that fill and read them.

Keys lie transposed, (rows, kv_heads, head_dim, length): one new query against all keys is then a plain matrix product.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridflow.models import PackedPlan


class KVCache:
    """One row for each sequence; `lengths` (rows,) counts the tokens it holds. Storage grows as rows are added.

    `keys` and `values` hold one tensor for each layer: (rows, kv_heads, head_dim, capacity) and
    (rows, kv_heads, capacity, value_dim).
    """

    def __init__(self, device: torch.device) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)

    def append(self, prompts: "PrefillPlan", source: Tensor, capacity: int) -> None:
        """Add one row for each entry of `source`, the prompt it starts from.

        `capacity`: room for the longest that any of these rows will become; rows that are there keep theirs.
        """
        lengths = torch.tensor(prompts.lengths, device=source.device)[source]
        layers = range(len(prompts.keys))
        if not self.keys:
            self.keys = [prompts.keys[i][:0].mT for i in layers]
            self.values = [prompts.values[i][:0] for i in layers]
        capacity = max(capacity, self.keys[0].shape[-1])
        used = int(self.lengths.max()) if len(self.lengths) else 0
        self.keys = [_grown(self.keys[i].mT, prompts.keys[i], source, capacity, used, transposed=True) for i in layers]
        self.values = [_grown(self.values[i], prompts.values[i], source, capacity, used) for i in layers]
        self.lengths = torch.cat([self.lengths, lengths])

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not listed; the listed ones move up in their order."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.lengths = self.lengths[rows]


def _grown(old: Tensor, new: Tensor, source: Tensor, capacity: int, used: int, *, transposed: bool = False) -> Tensor:
    """The rows of `old`, up to `used` tokens, then those of new[source]; both (rows, kv_heads, tokens, dim).

    The result has room for `capacity` tokens; `transposed` says that these lie along the last axis in memory.
    """
    rows, (_, heads, length, dim) = len(old) + len(source), new.shape
    shape = (rows, heads, dim, capacity) if transposed else (rows, heads, capacity, dim)
    storage = new.new_zeros(shape)
    by_token = storage.mT if transposed else storage
    by_token[: len(old), :, :used] = old[:, :, :used]
    by_token[len(old) :, :, :length] = new[source]
    return storage


class PrefillPlan:
    """Packed causal attention over prompts that also keeps their keys and values.

    `keys` and `values` by layer: (prompts, kv_heads, prompt_len, dim), padded on the right.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._packed = PackedPlan.from_lengths(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.keys[layer], self.values[layer] = self._as_rows(key), self._as_rows(value)
        return self._packed.attend(layer, query, key, value, scaling)

    def _as_rows(self, packed: Tensor) -> Tensor:
        rows = [x.transpose(0, 1) for x in packed[0].split(self.lengths, dim=1)]
        return pad_sequence(rows, batch_first=True).transpose(1, 2)


class DecodePlan:
    """One new token for each of the first `num_rows` rows: write its key and value at the row's end, attend to all.

    The caller adds 1 to the lengths of the rows that go on; what the others wrote is overwritten or never seen.
    """

    def __init__(self, cache: KVCache, num_rows: int) -> None:
        self.cache = cache
        self.rows = torch.arange(num_rows, device=cache.lengths.device)
        self.ends = cache.lengths[:num_rows].clone()
        self.used = int(self.ends.max()) + 1
        self.unseen = torch.arange(self.used, device=self.ends.device) > self.ends[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, :, self.ends] = key[:, :, 0]
        values[self.rows, :, self.ends] = value[:, :, 0]
        rows, heads, _, head_dim = query.shape
        kv_heads = key.shape[1]
        grouped = (query * scaling).reshape(rows * kv_heads, heads // kv_heads, head_dim)
        scores = torch.bmm(grouped, keys[:rows].flatten(0, 1)[..., : self.used]).view(rows, heads, self.used)
        scores = scores.masked_fill_(self.unseen[:, None], -torch.inf)
        weights = scores.softmax(-1, dtype=None if scores.dtype == torch.float64 else torch.float32).to(scores.dtype)
        out = torch.bmm(weights.view(rows * kv_heads, -1, self.used), values[:rows].flatten(0, 1)[:, : self.used])
        return out.view(rows, 1, heads, -1)
