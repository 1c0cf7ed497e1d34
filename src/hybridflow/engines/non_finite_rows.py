"""The search for rows with a non-finite loss or gradient: each row is computed again, alone."""

import math
from collections.abc import Callable

import torch

from hybridflow.engines.ranks import DATA, Ranks
from hybridflow.protocol import DataProto
from hybridflow.runtime.shards import local


def find_non_finite_rows(
    rows: DataProto, learn: Callable[[DataProto | None], float], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> list[str]:
    """Describe the rows, on all ranks, whose loss or gradient is not finite.

    `learn` adds the gradient of one row, or of none, and returns its loss. All ranks compute one row each at the same
    time, and their gradients are summed. If the sum is not finite although all losses are, the ranks take turns.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found = []

    def try_row(index: int | None) -> tuple[float, bool]:
        """Return the loss of a row, and whether the gradient, summed over the ranks' rows, is finite."""
        loss = learn(None if index is None else rows.select_idxs(torch.tensor([index])))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        finite = all(bool(local(gradient).isfinite().all()) for gradient in gradients)
        optimizer.zero_grad(set_to_none=True)
        return loss, ranks.count_all(not finite) == 0

    for index in range(max(ranks.gather(len(rows)))):
        mine = index if index < len(rows) else None
        loss, finite = try_row(mine)
        losses = ranks.gather(loss)
        if not finite and ranks.data > 1 and all(map(math.isfinite, losses)):
            turns = [try_row(mine if turn == ranks.place(DATA) else None)[1] for turn in range(ranks.data)]
            finite = turns[ranks.place(DATA)]
        elif ranks.data > 1:
            finite = finite or math.isfinite(loss)
        if mine is not None and not (finite and math.isfinite(loss)):
            row = rows.batch[index]
            row_id = int(row["row_ids"]) if "row_ids" in row.keys() else index  # noqa: SIM118
            found.append(f"row {row_id}: loss {loss}, gradient {'finite' if finite else 'not finite'}")
    return [text for of_rank in ranks.gather(found) for text in of_rank]
