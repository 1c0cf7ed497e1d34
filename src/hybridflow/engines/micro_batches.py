"""The assignment of rows to micro-batches by a token budget.

It depends on lengths and shared prompts only. Rows of similar length are grouped, which makes packed runs long and
keeps padding small; rows with the same prompt are adjacent.
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
    """Return the row indices of each micro-batch, every row exactly once; deterministic.

    lengths: (batch,) real tokens of each row. A micro-batch has at most `max_tokens` tokens: the sum of its lengths
    when packing, otherwise rows times the longest. families (batch,), for packing only: rows with equal numbers share
    their first `shared` (batch,) tokens, which count once in a micro-batch; None: no rows share tokens. Raises
    BatchError if a row exceeds the budget or is empty.
    """
    if not len(lengths):
        return []
    shortest, longest = (int(bound) for bound in lengths.aminmax())
    if shortest < 1:
        raise BatchError(f"row {int(lengths.argmin())} has no tokens (its attention_mask is all 0); remove the row.")
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
    """Return `plan()` of this rank, split by `spread` into the largest number of micro-batches of all ranks.

    Every micro-batch is a collective operation, so ranks must have equal numbers of them. Raises BatchError on every
    rank, before the first micro-batch, if the plan of one rank raises it.
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
    """Distribute the rows of a plan over `count` micro-batches of similar cost, the most expensive first.

    Rows of a family stay together. If that exceeds the token budget, or without packing, the largest micro-batches of
    the plan are halved instead. The last micro-batches may be empty.
    """
    rows = [row for micro_batch in plan for row in micro_batch.tolist()]  # ordered by length
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
        parts = [micro_batch.tolist() for micro_batch in plan] or [[]]
        while len(parts) < count:
            parts.sort(key=len)
            longest = parts.pop()
            parts += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    parts.sort(key=lambda part: -sum(costs[row] for row in part))
    return [torch.tensor(part, dtype=torch.int64) for part in parts]
