"""Rows of a batch as the input of one forward call, packed or padded, and results back in the response layout.

Knows the layout of a rollout batch (prompt columns, then response columns), not what is computed on it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.errors import BatchError
from hybridflow.models import PackedPlan, PaddedPlan, SharedPromptPlan, WholePlan, sharing_pays
from hybridflow.protocol import DataProto


@dataclass(frozen=True)
class ModelInput:
    """What one forward call needs.

    `positions` indexes the flattened (batch * seq) hidden states that predict a response token, in row order;
    `labels` (num_response_tokens,) are those tokens, `candidates` (num_response_tokens, k) others whose log-probs are
    asked for as well; `response_mask` (rows, response_len) is where they belong.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: WholePlan
    positions: Tensor
    labels: Tensor
    response_mask: Tensor
    num_tokens: int
    num_padding_tokens: int = 0
    candidates: Tensor | None = None

    @property
    def num_computed_tokens(self) -> int:
        """What the model computes: a shared prompt once, and padding."""
        return self.input_ids.numel()

    def to_rows(self, values: Tensor) -> Tensor:
        """(num_response_tokens, ...) -> (rows, response_len, ...), zero where the mask is off; differentiable."""
        mask = self.response_mask
        rows = values.new_zeros(*mask.shape, *values.shape[1:])
        return rows.masked_scatter(mask.view(*mask.shape, *[1] * (values.ndim - 1)).expand_as(rows), values)


def sequence_lengths(batch: DataProto) -> Tensor:
    """Real tokens of each row, (batch,) int64."""
    return batch.batch["attention_mask"].sum(-1)


def pack(batch: DataProto, *, share_prompts: bool = True, compiled: bool = True) -> ModelInput:
    """All real tokens of the rows, one row after another. Rows of equal length should be neighbours.

    With `share_prompts`, neighbours with the same prompt share one copy of it where that pays, but for its last token:
    that predicts the first token of each response, so each row keeps its own. `compiled`: whether there is compiled
    attention for the model.
    """
    ids, is_real, response_mask, place = _columns(batch)
    prefix_lens = _shared_with_row_before(batch, compiled) if share_prompts else torch.zeros_like(ids[:, 0])
    is_repeated = (place < prefix_lens[:, None]) & is_real
    kept = is_real & ~is_repeated
    lengths = kept.sum(-1)
    starts = lengths.cumsum(0) - lengths - is_repeated.sum(-1)  # where the row would begin with its prompt
    return ModelInput(
        input_ids=ids[kept].unsqueeze(0),
        position_ids=place[kept].unsqueeze(0),
        plan=_plan(lengths.tolist(), prefix_lens.tolist()),
        positions=_predictors(starts, place, response_mask),
        labels=_responses(ids, response_mask)[response_mask],
        response_mask=response_mask,
        num_tokens=int(is_real.sum()),
    )


def pad(batch: DataProto) -> ModelInput:
    """One row for each, its real tokens moved to the left and padded on the right up to the longest."""
    ids, is_real, response_mask, place = _columns(batch)
    lengths = is_real.sum(-1)
    width = int(lengths.max())
    columns = torch.arange(width, device=ids.device)
    input_ids = ids.new_zeros(len(ids), width)
    input_ids[columns < lengths[:, None]] = ids[is_real]
    starts = torch.arange(len(ids), device=ids.device) * width
    return ModelInput(
        input_ids=input_ids,
        position_ids=columns.expand_as(input_ids),
        plan=PaddedPlan(),
        positions=_predictors(starts, place, response_mask),
        labels=_responses(ids, response_mask)[response_mask],
        response_mask=response_mask,
        num_tokens=int(lengths.sum()),
        num_padding_tokens=input_ids.numel() - int(lengths.sum()),
    )


def idle_input(num_tokens: int, device: torch.device) -> ModelInput:
    """Tokens that nobody counts: what a rank computes while others have rows and it has none."""
    zeros = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    return ModelInput(
        input_ids=zeros,
        position_ids=torch.arange(num_tokens, device=device)[None],
        plan=PackedPlan.from_lengths([num_tokens]),
        positions=zeros[0, :1],
        labels=zeros[0, :1],
        response_mask=torch.ones(1, 1, dtype=torch.bool, device=device),
        num_tokens=0,
        num_padding_tokens=num_tokens,
    )


def prompt_families(batch: DataProto, *, compiled: bool) -> tuple[Tensor, Tensor]:
    """For each row a number, (batch,), equal for rows that share their prompt; and how many tokens of it they can."""
    prompts = _prompts(batch)
    shared, pays = _sharing(batch, prompts, compiled)
    families: dict[bytes | int, int] = {}
    rows = zip(prompts.cpu().numpy(), pays.tolist(), strict=True)
    keys = [row.tobytes() if can else number for number, (row, can) in enumerate(rows)]
    return torch.tensor([families.setdefault(key, len(families)) for key in keys], device=prompts.device), shared


def _shared_with_row_before(batch: DataProto, compiled: bool) -> Tensor:
    """Tokens that each row shares with the row before it, (batch,): its prompt but for the last token, or 0."""
    prompts = _prompts(batch)
    shared, pays = _sharing(batch, prompts, compiled)
    is_same = (prompts[1:] == prompts[:-1]).all(-1) & pays[1:] & pays[:-1]
    return shared * torch.cat([is_same.new_zeros(1), is_same])


def _sharing(batch: DataProto, prompts: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    """How many tokens of its prompt each row can share, and whether it pays: (batch,) each."""
    shared = ((prompts >= 0).sum(-1) - 1).clamp(min=0)
    return shared, sharing_pays(shared, sequence_lengths(batch), compiled)


def _prompts(batch: DataProto) -> Tensor:
    """The prompt columns, -1 where they are padding."""
    width = batch.batch["input_ids"].shape[1] - batch.batch["response_mask"].shape[1]
    is_real = batch.batch["attention_mask"][:, :width].bool()
    return batch.batch["input_ids"][:, :width].masked_fill(~is_real, -1)


def _plan(lengths: list[int], prefix_lens: list[int]) -> WholePlan:
    """`lengths` of rows without what they share, `prefix_lens`, with the row before."""
    if not any(prefix_lens):
        return PackedPlan.from_lengths(lengths)
    families: list[list[int]] = []
    for row, (length, prefix_len) in enumerate(zip(lengths, prefix_lens, strict=True)):
        if prefix_len:
            families[-1].append(length)
        elif row + 1 < len(lengths) and prefix_lens[row + 1]:
            trunk = prefix_lens[row + 1]
            families.append([trunk, length - trunk])
        else:
            families.append([length])
    return SharedPromptPlan(tuple(map(tuple, families)))


def _columns(batch: DataProto) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """input_ids, which are real, which response tokens count, and each real token's place among those of its row.

    Raises BatchError for a response token that is padding itself or follows nothing: no hidden state predicts it.
    """
    columns = batch.batch
    ids, is_real, response_mask = (
        columns["input_ids"],
        columns["attention_mask"].bool(),
        columns["response_mask"].bool(),
    )
    place = is_real.cumsum(-1) - 1
    unpredicted = response_mask & ~(_responses(is_real, response_mask) & (_responses(place, response_mask) > 0))
    if unpredicted.any():
        row = int(unpredicted.any(-1).nonzero()[0])
        raise BatchError(
            f"row {row}: response_mask counts a token that attention_mask calls padding, or that follows no prompt; "
            "every counted response token must be real and have a real token before it."
        )
    return ids, is_real, response_mask, place


def _responses(column: Tensor, response_mask: Tensor) -> Tensor:
    """The response part (rows, response_len) of a column (rows, seq_len)."""
    return column[:, column.shape[1] - response_mask.shape[1] :]


def _predictors(starts: Tensor, place: Tensor, response_mask: Tensor) -> Tensor:
    """The hidden state just before each counted response token, where row r begins at starts[r]."""
    return (starts[:, None] + _responses(place, response_mask) - 1)[response_mask]
