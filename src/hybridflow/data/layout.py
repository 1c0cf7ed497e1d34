"""The tensor layout of every batch: prompts padded on the left, responses on the right."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybridflow.protocol import DataProto


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (ids, mask), both (batch, longest row) int64, with the rows at the right edge."""
    return _pad(rows, pad_id, "left")


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (ids, mask), both (batch, longest row) int64, with the rows at the left edge."""
    return _pad(rows, pad_id, "right")


def _pad(rows: Sequence[Sequence[int]], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    if not rows:
        return torch.empty(0, 0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.int64)
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=pad_id, padding_side=side)
    return ids, pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True, padding_side=side)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return the positions (batch, seq_len): 0 at the first real token of each row and in the padding before it."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def collate_rows(rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[bool]]], pad_id: int) -> DataProto:
    """Return rows of (prompt ids, response ids, whether each response token counts) as a batch of tensors.

    `prompts` (batch, prompt_len) int64 padded on the left, `responses` (batch, response_len) int64 padded on the right,
    `response_mask` (batch, response_len) bool, and `input_ids` = prompts + responses, `attention_mask`, `position_ids`
    (batch, prompt_len + response_len) int64. `meta_info["pad_token_id"]` is the padding value.
    """
    prompts, prompt_mask = pad_left([prompt for prompt, _, _ in rows], pad_id)
    responses, is_real = pad_right([response for _, response, _ in rows], pad_id)
    counts, _ = pad_right([counted for _, _, counted in rows], 0)
    attention_mask = torch.cat([prompt_mask, is_real], dim=1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": counts.bool(),
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask),
    }
    return DataProto.from_dict(tensors=tensors, meta_info={"pad_token_id": pad_id})
