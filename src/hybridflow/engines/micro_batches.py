"""Which rows are computed together: micro-batches by a budget of tokens.

Knows lengths, and which rows have a prompt in common. Rows of similar length meet, so that packed runs are long and
padded rows are short of padding; rows of one prompt are neighbours.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridflow.algorithms import balanced_partition
from hybridflow.engines.ranks import Ranks
from hybridflow.errors import BatchError


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


def agree_on_micro_batches(
    plan: Callable[[], list[Tensor]], spread: Callable[[list[Tensor], int], list[Tensor]], ranks: Ranks
) -> list[Tensor]:
    """`plan()` of this rank, in as many micro-batches as the rank that has most.

    Every micro-batch is a collective call, so ranks settle their number, or that one of them cannot go on, before the
    first. `spread` makes more of them out of a plan. Raises BatchError on every rank if any rank's plan does.
    """
    if ranks.is_alone:
        return plan()
    own, problem = [], ""
    try:
        own = plan()
    except BatchError as error:
        problem = str(error)
    answers = ranks.gather((len(own), problem))
    if problems := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text]:
        raise BatchError("; ".join(problems))
    return spread(own, max(count for count, _ in answers))


def spread_micro_batches(
    plan: list[Tensor],
    count: int,
    lengths: Tensor,
    costs: Sequence[float],
    max_tokens: int,
    *,
    packing: bool,
    families: Tensor | None = None,
    shared: Tensor | None = None,
) -> list[Tensor]:
    """The rows of a plan in `count` micro-batches that take equally long, the longest first; the last may be empty.

    Rows of a family stay together. Where that would exceed the budget of tokens, or without packing, the largest
    micro-batches of the plan are halved instead.
    """
    rows = [row for micro_batch in plan for row in micro_batch.tolist()]  # of similar length are neighbours
    units: dict[int, list[int]] = {}
    for row in rows:
        units.setdefault(row if families is None else int(families[row]), []).append(row)
    members = list(units.values())
    tokens = [int(lengths[unit].sum()) for unit in members]
    if shared is not None:
        tokens = [n - (len(unit) - 1) * int(shared[unit[0]]) for n, unit in zip(tokens, members, strict=True)]
    partition = balanced_partition([sum(costs[row] for row in unit) for unit in members], count)
    parts = [[row for unit in part for row in members[unit]] for part in partition]
    if not packing or any(sum(tokens[unit] for unit in part) > max_tokens for part in partition):
        parts = [micro_batch.tolist() for micro_batch in plan]
        while len(parts) < count:
            parts.sort(key=len)
            longest = parts.pop() if parts else []
            parts += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    parts.sort(key=lambda part: -sum(costs[row] for row in part))
    return [torch.tensor(part, dtype=torch.int64) for part in parts]
