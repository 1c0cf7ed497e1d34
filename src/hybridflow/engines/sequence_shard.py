"""The sequence parallel shard of a micro-batch's tokens, and the gathering of its results."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hybridflow.engines.device_copy import to_device
from hybridflow.engines.packing import ModelInput
from hybridflow.models import GatherTokens, UlyssesPlan


@dataclass(frozen=True)
class SequenceShard:
    """A rank's shard: `input` of its model, and `mine`, the indices of the response tokens that it predicts."""

    whole: ModelInput
    input: ModelInput
    mine: Tensor
    group: dist.ProcessGroup

    def to_rows(self, values: Tensor) -> Tensor:
        """Gather values of the response tokens of all ranks to (rows, response_len), equal on all ranks."""
        return self.whole.to_rows(GatherTokens.apply(values, self.mine, len(self.whole.labels), self.group))

    def to(self, device: torch.device) -> "SequenceShard":
        """Return the shard with its tensors on the device; the host does not wait for the copies."""
        whole, mine = self.whole.to(device), to_device(self.mine, device)
        return replace(self, whole=whole, input=self.input.to(device), mine=mine)


def sequence_shard_of(whole: ModelInput, group: dist.ProcessGroup) -> SequenceShard:
    """Take the columns of this rank, after padding the tokens so that each rank has equally many."""
    size, rank = group.size(), group.rank()
    padding = -whole.input_ids.shape[1] % size
    width = (whole.input_ids.shape[1] + padding) // size
    columns = slice(rank * width, (rank + 1) * width)
    tokens = whole.input_ids.shape[1]
    row, column = whole.positions // tokens, whole.positions % tokens
    is_mine = column // width == rank
    mine = replace(
        whole,
        input_ids=pad(whole.input_ids, (0, padding))[:, columns],
        position_ids=pad(whole.position_ids.expand(len(whole.input_ids), -1), (0, padding))[:, columns],
        plan=UlyssesPlan(whole.plan.with_filling(padding), group),  # pyright: ignore
        positions=(row * width + column - rank * width)[is_mine],
        labels=whole.labels[is_mine],
        candidates=None if whole.candidates is None else whole.candidates[is_mine],
    )
    return SequenceShard(whole, mine, is_mine.nonzero().flatten(), group)
