"""Which rows are computed together: micro-batches by a budget of tokens.

Knows lengths only. Rows of similar length meet, so that packed runs are long and padded rows are short of padding.
"""

import torch
from torch import Tensor

from hybridflow.errors import BatchError


def plan_micro_batches(lengths: Tensor, max_tokens: int, *, packing: bool) -> list[Tensor]:
    """Row indices of each micro-batch, every row exactly once; the same for equal lengths.

    lengths: (batch,) real tokens of each row. A micro-batch holds at most `max_tokens` tokens: the sum of its lengths
    when packing, rows times the longest otherwise. Raises BatchError if a single row is longer than that, or empty.
    """
    if not len(lengths):
        return []
    shortest, longest = (int(bound) for bound in lengths.aminmax())
    if shortest < 1:
        raise BatchError(f"row {int(lengths.argmin())} has no tokens, its attention_mask is all 0; leave it out.")
    if longest > max_tokens:
        raise BatchError(
            f"row {int(lengths.argmax())} has {longest} tokens, more than memory.max_tokens_per_micro_batch="
            f"{max_tokens}; set it to at least {longest}."
        )
    order = torch.argsort(lengths, stable=True)
    micro_batches: list[list[int]] = [[]]
    used = 0
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        rows = micro_batches[-1]
        would_use = used + length if packing else (len(rows) + 1) * length
        if rows and would_use > max_tokens:
            micro_batches.append([row])
            used = length
        else:
            rows.append(row)
            used = would_use
    return [torch.tensor(rows) for rows in micro_batches]
