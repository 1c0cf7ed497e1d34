"""The search for rows with a non-finite loss or gradient: each row is computed again, alone."""

import math
from typing import TYPE_CHECKING

import torch

from hybridflow.engines.started_update import UpdatePart
from hybridflow.runtime.shards import local

if TYPE_CHECKING:
    from hybridflow.engines.torch_engine import TorchEngine


def find_non_finite_rows(engine: "TorchEngine", part: UpdatePart) -> list[str]:
    """Describe the rows of an update's part, on all ranks, whose loss or gradient is not finite.

    All ranks compute one row each at the same time, and their gradients are summed. If the sum is not finite although
    all losses are, the ranks take turns.
    """
    ranks, rows, found = engine.ranks, part.rows, []

    def learn(index: int | None) -> tuple[float, bool]:
        """Return the loss of a row, and whether the gradient, summed over the ranks' rows, is finite."""
        row = None if index is None else engine._part(rows, torch.tensor([index]))
        share, _ = engine._learn(row, part.loss_function, part.with_entropy, part.temperature)
        loss = float(share.loss)
        gradients = [parameter.grad for parameter in engine.parameters.values() if parameter.grad is not None]
        finite = all(bool(local(gradient).isfinite().all()) for gradient in gradients)
        engine.optimizer.zero_grad(set_to_none=True)
        return loss, ranks.count_all(not finite) == 0

    for index in range(max(ranks.gather(len(rows)))):
        mine = index if index < len(rows) else None
        loss, finite = learn(mine)
        losses = ranks.gather(loss)
        if not finite and ranks.data > 1 and all(map(math.isfinite, losses)):
            turns = [learn(mine if turn == ranks.place("data") else None)[1] for turn in range(ranks.data)]
            finite = turns[ranks.place("data")]
        elif ranks.data > 1:
            finite = finite or math.isfinite(loss)
        if mine is not None and not (finite and math.isfinite(loss)):
            row = rows.batch[index]
            row_id = int(row["row_ids"]) if "row_ids" in row.keys() else index  # noqa: SIM118
            found.append(f"row {row_id}: loss {loss}, gradient {'finite' if finite else 'not finite'}")
    return [text for of_rank in ranks.gather(found) for text in of_rank]
