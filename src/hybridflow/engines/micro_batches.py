"""Which rows are computed together: micro-batches by a budget of tokens.

Knows lengths, and which rows have a prompt in common. Rows of similar length meet, so that packed runs are long and
padded rows are short of padding; rows of one prompt are neighbours.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridflow.engines.ranks import Ranks
from hybridflow.errors import BatchError


def agree_on_micro_batches(plan: Callable[[], list[Tensor]], ranks: Ranks) -> list[Tensor]:
    """`plan()` of this rank with as many micro-batches as that of the rank that has most.

    Every micro-batch is a collective call, so ranks settle their number, or that one of them cannot go on, before the
    first: rows are spread over more micro-batches, and a rank with too few rows has empty ones. Raises BatchError on
    every rank if any rank's plan does.
    """
    try:
        own, problem = plan(), ""
    except BatchError as error:
        if ranks.is_alone:
            raise
        own, problem = [], str(error)
    if ranks.is_alone:
        return own
    answers = ranks.gather((len(own), problem))
    if problems := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]:
        raise BatchError("; ".join(problems))
    return _spread(own, max(count for count, _ in answers))


def _spread(micro_batches: list[Tensor], count: int) -> list[Tensor]:
    """The same rows in `count` micro-batches: the largest are halved; then empty ones are added."""
    parts = list(micro_batches)
    while len(parts) < count:
        longest = max(range(len(parts)), key=lambda part: (len(parts[part]), -part), default=None)
        if longest is None or len(parts[longest]) < 2:
            parts.append(torch.zeros(0, dtype=torch.int64))
        else:
            parts[longest : longest + 1] = parts[longest].tensor_split(2)
    return parts


def plan_micro_batches(
    lengths: Tensor, max_tokens: int, *, packing: bool, families: Tensor | None = None, shared: Tensor | None = None
) -> list[Tensor]:
    """Row indices of each micro-batch, every row exactly once; the same for equal lengths and families.

    lengths: (batch,) real tokens of each row. A micro-batch holds at most `max_tokens` tokens: the sum of its lengths
    when packing, rows times the longest otherwise. families (batch,), packing only: rows with equal numbers have
    their first `shared` (batch,) tokens in common, which count once in a micro-batch; None is no such rows. Raises
    BatchError if a single row is longer than the budget, or empty.
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
    if families is not None:
        longest_of = torch.zeros_like(families).scatter_reduce(0, families, lengths, "amax")
        order = order[torch.argsort(families[order], stable=True)]
        order = order[torch.argsort(longest_of[families[order]], stable=True)]
    saved = torch.zeros_like(lengths)
    if families is not None and shared is not None:
        saved[1:] = shared[order][1:] * (families[order][1:] == families[order][:-1])
    micro_batches: list[list[int]] = [[]]
    used = 0
    for row, length, saving in zip(order.tolist(), lengths[order].tolist(), saved.tolist(), strict=True):
        rows = micro_batches[-1]
        would_use = used + length - saving if packing else (len(rows) + 1) * length
        if rows and would_use > max_tokens:
            micro_batches.append([row])
            used = length
        else:
            rows.append(row)
            used = would_use
    return [torch.tensor(rows) for rows in micro_batches]
