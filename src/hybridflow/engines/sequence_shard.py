"""The shard of a micro-batch's tokens that a rank computes on under sequence parallel, and results back together."""

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.engines.packing import ModelInput
from hybridflow.models import GatherTokens, UlyssesPlan


@dataclass(frozen=True)
class SequenceShard:
    """`input` is what this rank gives to its model; `is_mine` marks which response tokens of the whole it predicts."""

    whole: ModelInput
    input: ModelInput
    is_mine: Tensor
    group: dist.ProcessGroup

    def to_rows(self, values: Tensor) -> Tensor:
        """Values of this rank's response tokens -> (rows, response_len) of all ranks' tokens, equal on each."""
        places = self.is_mine.nonzero().flatten()
        return self.whole.to_rows(GatherTokens.apply(values, places, len(self.is_mine), self.group))


def sequence_shard_of(whole: ModelInput, group: dist.ProcessGroup) -> SequenceShard:
    """The columns of this rank, of tokens that are filled up to as many for each rank."""
    size, rank = group.size(), group.rank()
    filled = -whole.input_ids.shape[1] % size
    width = (whole.input_ids.shape[1] + filled) // size
    columns = slice(rank * width, (rank + 1) * width)
    tokens = whole.input_ids.shape[1]
    row, column = whole.positions // tokens, whole.positions % tokens
    is_mine = column // width == rank
    mine = replace(
        whole,
        input_ids=pad(whole.input_ids, (0, filled))[:, columns],
        position_ids=pad(whole.position_ids.expand(len(whole.input_ids), -1), (0, filled))[:, columns],
        plan=UlyssesPlan(whole.plan.with_filling(filled), group),  # pyright: ignore
        positions=(row * width + column - rank * width)[is_mine],
        labels=whole.labels[is_mine],
        candidates=None if whole.candidates is None else whole.candidates[is_mine],
    )
    return SequenceShard(whole, mine, is_mine, group)
