"""The tensor layout of every batch: prompts padded on the left, responses on the right."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (ids, mask), both (batch, longest row) int64, with the rows at the right edge."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        start = width - len(row)
        ids[i, start:] = torch.tensor(row, dtype=torch.int64)
        mask[i, start:] = 1
    return ids, mask


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (ids, mask), both (batch, longest row) int64, with the rows at the left edge."""
    width = max((len(row) for row in rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        mask[i, : len(row)] = 1
    return ids, mask


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions (batch, seq_len): 0 at the first real token of each row and in the padding before it."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
