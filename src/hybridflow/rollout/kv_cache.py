"""The keys and values of running sequences, allocated once for a wave, and the attention plans that fill and read it.

Keys lie transposed, (rows, kv_heads, head_dim, length): one new query against all keys is then a plain matrix product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models import PackedPlan


class KVCache:
    """`lengths` (rows,) counts the tokens each row holds. Storage grows with rows and length, by doubling of length."""

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.kv_heads, self.head_dim, self.dtype, self.device = kv_heads, head_dim, dtype, device
        self.keys: list[Tensor] = [self._empty(0, 0, head_dim) for _ in range(num_layers)]
        self.values: list[Tensor] = [self._empty(0, head_dim, 0) for _ in range(num_layers)]
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        self.capacity = 0

    def _empty(self, rows: int, inner: int, length: int) -> Tensor:
        return torch.empty(rows, self.kv_heads, inner, length, dtype=self.dtype, device=self.device)

    def append(
        self, prompt_keys: list[Tensor], prompt_values: list[Tensor], source: Tensor, lengths: Tensor, capacity: int
    ) -> None:
        """Add one row for each entry of `source`: the prompt it starts from.

        prompt_keys, prompt_values: for each layer (prompts, kv_heads, prompt_len, head_dim), real tokens first;
        lengths (rows,) counts them; `capacity` is the longest any of the rows will become.
        """
        old_rows, rows = len(self.lengths), len(self.lengths) + len(source)
        capacity = max(capacity, self.capacity)
        used = int(self.lengths.max()) if old_rows else 0
        for layer, (new_keys, new_values) in enumerate(zip(prompt_keys, prompt_values, strict=True)):
            keys = torch.zeros(rows, self.kv_heads, self.head_dim, capacity, dtype=self.dtype, device=self.device)
            values = torch.zeros(rows, self.kv_heads, capacity, self.head_dim, dtype=self.dtype, device=self.device)
            if old_rows:
                keys[:old_rows, :, :, :used] = self.keys[layer][..., :used]
                values[:old_rows, :, :used] = self.values[layer][:, :, :used]
            prompt_len = new_keys.shape[2]
            keys[old_rows:, :, :, :prompt_len] = new_keys.transpose(2, 3)[source]
            values[old_rows:, :, :prompt_len] = new_values[source]
            self.keys[layer], self.values[layer] = keys, values
        self.lengths = torch.cat([self.lengths, lengths])
        self.capacity = capacity

    def keep(self, rows: Tensor) -> None:
        """Drop every row that is not listed; the listed ones move up in their order."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.lengths = self.lengths[rows]
        if not len(rows):
            self.capacity = 0


@dataclass
class PrefillPlan:
    """Packed causal attention over prompts that also hands back their keys and values, padded on the right."""

    lengths: list[int]
    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.keys[layer], self.values[layer] = self._as_rows(key), self._as_rows(value)
        return PackedPlan.from_lengths(self.lengths).attend(layer, query, key, value, scaling)

    def _as_rows(self, packed: Tensor) -> Tensor:
        rows = [x.transpose(0, 1) for x in packed[0].split(self.lengths, dim=1)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).transpose(1, 2)


class DecodePlan:
    """One new token for each row of the cache: write its key and value at the row's end, attend to all before it."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.rows = torch.arange(len(cache.lengths), device=cache.device)
        self.used = int(cache.lengths.max()) + 1
        unseen = torch.arange(self.used, device=cache.device) > cache.lengths[:, None]
        self.bias = torch.zeros(unseen.shape, dtype=cache.dtype, device=cache.device).masked_fill_(unseen, -torch.inf)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        cache = self.cache
        cache.keys[layer][self.rows, :, :, cache.lengths] = key[:, :, 0]
        cache.values[layer][self.rows, :, cache.lengths] = value[:, :, 0]
        rows, heads, _, head_dim = query.shape
        grouped = (query * scaling).reshape(rows * cache.kv_heads, heads // cache.kv_heads, head_dim)
        keys = cache.keys[layer].flatten(0, 1)[..., : self.used]
        values = cache.values[layer].flatten(0, 1)[:, : self.used]
        scores = torch.bmm(grouped, keys).view(rows, heads, self.used) + self.bias[:, None]
        weights = scores.softmax(-1, dtype=torch.float32 if scores.dtype == torch.bfloat16 else None).to(scores.dtype)
        out = torch.bmm(weights.view(rows * cache.kv_heads, -1, self.used), values)
        return out.view(rows, 1, heads, head_dim)
