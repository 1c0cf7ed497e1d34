"""Rows of a batch as one packed sequence without padding, and results back in the padded response layout.

Knows the layout of a rollout batch (left-padded prompt, right-padded response), not what is computed on it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.models.attention import AttentionPlan, PackedPlan, PaddedPlan
from hybridflow.protocol import DataProto


@dataclass(frozen=True)
class ModelInput:
    """What one forward call needs.

    `positions` indexes the flattened (batch * seq) hidden states that predict a response token, in row order;
    `labels` (num_response_tokens,) are those tokens; `response_mask` (rows, response_len) is where they belong.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: AttentionPlan
    positions: Tensor
    labels: Tensor
    response_mask: Tensor
    num_tokens: int
    num_computed_tokens: int

    def to_rows(self, values: Tensor) -> Tensor:
        """(num_response_tokens,) -> (rows, response_len), zero where the mask is off; differentiable."""
        rows = values.new_zeros(self.response_mask.shape)
        return rows.masked_scatter(self.response_mask, values)


def sequence_lengths(batch: DataProto) -> Tensor:
    """Real tokens of each row, (batch,) int64."""
    return batch.batch["attention_mask"].sum(-1)


def pack(batch: DataProto) -> ModelInput:
    """All real tokens of the rows, one row after another. Rows of equal length should be neighbours."""
    ids, is_real, response_mask = _columns(batch)
    lengths = is_real.sum(-1)
    position_ids = (is_real.cumsum(-1) - 1)[is_real]
    starts = lengths.cumsum(0) - lengths
    response_lengths = response_mask.sum(-1)
    # A response token at offset o of its row is predicted by the hidden state at o - 1.
    first = starts + lengths - response_lengths - 1
    offsets = torch.arange(response_mask.shape[1], device=ids.device).expand_as(response_mask)[response_mask]
    positions = first.repeat_interleave(response_lengths) + offsets
    return ModelInput(
        input_ids=ids[is_real].unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        plan=PackedPlan.from_lengths(lengths.tolist()),
        positions=positions,
        labels=ids[:, ids.shape[1] - response_mask.shape[1] :][response_mask],
        response_mask=response_mask,
        num_tokens=int(lengths.sum()),
        num_computed_tokens=int(lengths.sum()),
    )


def pad(batch: DataProto) -> ModelInput:
    """The rows as they are, cut to the columns any of them uses."""
    ids, is_real, response_mask = _columns(batch)
    used = is_real.any(0).nonzero()
    start, stop = int(used[0]), int(used[-1]) + 1
    prompt_len = ids.shape[1] - response_mask.shape[1]
    columns = torch.arange(prompt_len - 1 - start, ids.shape[1] - 1 - start, device=ids.device).expand_as(response_mask)
    rows = torch.arange(len(ids), device=ids.device)[:, None] * (stop - start)
    real = is_real[:, start:stop]
    return ModelInput(
        input_ids=ids[:, start:stop],
        position_ids=(real.cumsum(-1) - 1).clamp(min=0),
        plan=PaddedPlan(real),
        positions=(rows + columns)[response_mask],
        labels=ids[:, prompt_len:][response_mask],
        response_mask=response_mask,
        num_tokens=int(is_real.sum()),
        num_computed_tokens=real.numel(),
    )


def _columns(batch: DataProto) -> tuple[Tensor, Tensor, Tensor]:
    columns = batch.batch
    return columns["input_ids"], columns["attention_mask"].bool(), columns["response_mask"].bool()
