"""Conversion of rows to the input of one forward call, packed or padded, and of results to the response layout.

It knows the layout of a rollout batch (prompt columns, then response columns), not the computation.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.engines.device_copy import to_device
from hybridflow.errors import BatchError
from hybridflow.models.attention import PackedPlan, PaddedPlan, WholePlan
from hybridflow.models.attention_backend import AttentionName
from hybridflow.models.routes import NOT_RECORDED
from hybridflow.models.shared_prompts import SharedPromptPlan, sharing_pays
from hybridflow.protocol import DataProto


@dataclass(frozen=True)
class ModelInput:
    """The input of one forward call.

    `positions` indexes the flattened (batch * seq) hidden states that predict a response token, in row order;
    `labels` (num_response_tokens,) are these tokens, `candidates` (num_response_tokens, k) other tokens with requested
    log-probs; `response_mask` (rows, response_len) marks their positions in the rows, and `places`
    (num_response_tokens,) are these positions in the flattened mask. `routes` (*input_ids.shape, layers, top_k): those
    that the rows were sampled with, see `models.routes`. `is_real` (like input_ids) marks tokens that are not padding;
    None: all.
    """

    input_ids: Tensor
    position_ids: Tensor
    plan: WholePlan
    positions: Tensor
    labels: Tensor
    response_mask: Tensor
    places: Tensor
    num_tokens: int
    num_padding_tokens: int = 0
    candidates: Tensor | None = None
    routes: Tensor | None = None
    is_real: Tensor | None = None

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens that the model computes: a shared prompt counts once, and padding counts."""
        return self.input_ids.numel()

    def to_rows(self, values: Tensor) -> Tensor:
        """Scatter (num_response_tokens, ...) to (rows, response_len, ...), zero where the mask is 0; differentiable."""
        shape = self.response_mask.shape
        return values.new_zeros(shape.numel(), *values.shape[1:]).index_copy(0, self.places, values).unflatten(0, shape)

    def to(self, device: torch.device) -> "ModelInput":
        """Return the input with its tensors on the device; the host does not wait for the copies."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: to_device(x, device) for name, x in tensors.items()})


def sequence_lengths(batch: DataProto) -> Tensor:
    """Return the number of real tokens of each row, (batch,) int64."""
    return batch.batch["attention_mask"].sum(-1)


def pack(batch: DataProto, *, share_prompts: bool = True, attention: AttentionName = "cpu_kernel") -> ModelInput:
    """Concatenate the real tokens of the rows. Rows of equal length should be adjacent.

    With `share_prompts`, adjacent rows with the same prompt share one copy of it if that is faster. Each row keeps the
    last token of the prompt, which predicts its first response token. `attention`: the implementation for shared
    prompts.
    """
    ids, is_real, response_mask, position_ids = _columns(batch)
    prefix_lens = _shared_with_row_before(batch, attention) if share_prompts else torch.zeros_like(ids[:, 0])
    is_repeated = (position_ids < prefix_lens[:, None]) & is_real
    kept = is_real & ~is_repeated
    lengths = kept.sum(-1)
    starts = lengths.cumsum(0) - lengths - is_repeated.sum(-1)  # start of the row if it included its shared prompt
    return ModelInput(
        input_ids=ids[kept].unsqueeze(0),
        position_ids=position_ids[kept].unsqueeze(0),
        plan=_plan(lengths.tolist(), prefix_lens.tolist()),
        positions=_predictors(starts, position_ids, response_mask),
        labels=_responses(ids, response_mask)[response_mask],
        response_mask=response_mask,
        places=_places(response_mask),
        num_tokens=int(is_real.sum()),
        routes=batch.batch["routes"][kept].unsqueeze(0) if "routes" in batch.batch else None,
    )


def pad(batch: DataProto) -> ModelInput:
    """Move the real tokens of each row to the left, and pad on the right to the longest row."""
    ids, is_real, response_mask, position_ids = _columns(batch)
    lengths = is_real.sum(-1)
    width = int(lengths.max())
    columns = torch.arange(width, device=ids.device)

    def moved(values: Tensor, filling: int = 0) -> Tensor:
        to = values.new_full((len(ids), width, *values.shape[2:]), filling)
        to[columns < lengths[:, None]] = values[is_real]
        return to

    input_ids = moved(ids)
    starts = torch.arange(len(ids), device=ids.device) * width
    return ModelInput(
        input_ids=input_ids,
        position_ids=columns.expand_as(input_ids),
        plan=PaddedPlan(),
        positions=_predictors(starts, position_ids, response_mask),
        labels=_responses(ids, response_mask)[response_mask],
        response_mask=response_mask,
        places=_places(response_mask),
        num_tokens=int(lengths.sum()),
        num_padding_tokens=input_ids.numel() - int(lengths.sum()),
        routes=moved(batch.batch["routes"], NOT_RECORDED) if "routes" in batch.batch else None,
        is_real=columns < lengths[:, None],
    )


def idle_input(num_tokens: int) -> ModelInput:
    """Make dummy input for a rank without rows in a micro-batch; its tokens are excluded from all counts."""
    zeros = torch.zeros(1, num_tokens, dtype=torch.int64)
    return ModelInput(
        input_ids=zeros,
        position_ids=torch.arange(num_tokens)[None],
        plan=PackedPlan.from_lengths([num_tokens]),
        positions=zeros[0, :1],
        labels=zeros[0, :1],
        response_mask=torch.ones(1, 1, dtype=torch.bool),
        places=zeros[0, :1],
        num_tokens=0,
        num_padding_tokens=num_tokens,
        is_real=zeros.bool(),
    )


def prompt_families(batch: DataProto, *, attention: AttentionName) -> tuple[Tensor, Tensor]:
    """Return a family number for each row, (batch,), equal if rows share a prompt, and the shareable prompt tokens."""
    prompts = _prompts(batch)
    shared, is_faster = _sharing(batch, prompts, attention)
    families: dict[bytes | int, int] = {}
    rows = zip(_shared_values(batch, prompts).cpu().numpy(), is_faster.tolist(), strict=True)
    keys = [row.tobytes() if can_share else number for number, (row, can_share) in enumerate(rows)]
    return torch.tensor([families.setdefault(key, len(families)) for key in keys], device=prompts.device), shared


def _shared_with_row_before(batch: DataProto, attention: AttentionName) -> Tensor:
    """Return the number of tokens each row shares with the previous row, (batch,): its prompt minus one token, or 0."""
    prompts = _prompts(batch)
    shared, is_faster = _sharing(batch, prompts, attention)
    keys = _shared_values(batch, prompts)
    is_same = (keys[1:] == keys[:-1]).all(-1) & is_faster[1:] & is_faster[:-1]
    return shared * torch.cat([is_same.new_zeros(1), is_same])


def _shared_values(batch: DataProto, prompts: Tensor) -> Tensor:
    """Return what rows that share a prompt have in common: its tokens, and their routes except the last token's."""
    if "routes" not in batch.batch:
        return prompts
    routes = batch.batch["routes"][:, : prompts.shape[1] - 1]
    return torch.cat([prompts.view(routes.dtype), routes.flatten(1)], dim=-1)


def _sharing(batch: DataProto, prompts: Tensor, attention: AttentionName) -> tuple[Tensor, Tensor]:
    """Return how many prompt tokens each row can share, and whether sharing is faster: (batch,) each."""
    shared = ((prompts >= 0).sum(-1) - 1).clamp(min=0)
    return shared, sharing_pays(shared, sequence_lengths(batch), attention)


def _prompts(batch: DataProto) -> Tensor:
    """Return the prompt columns, with -1 for padding."""
    width = batch.batch["input_ids"].shape[1] - batch.batch["response_mask"].shape[1]
    is_real = batch.batch["attention_mask"][:, :width].bool()
    return batch.batch["input_ids"][:, :width].masked_fill(~is_real, -1)


def _plan(lengths: list[int], prefix_lens: list[int]) -> WholePlan:
    """Build the attention plan. `lengths` exclude `prefix_lens`, the tokens shared with the previous row."""
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
    """Return input_ids, the mask of real tokens, the response mask, and position ids counted over real tokens.

    Raises BatchError for a response token that is padding or follows no real token: no hidden state predicts it.
    """
    columns = batch.batch
    ids, is_real, response_mask = (
        columns["input_ids"],
        columns["attention_mask"].bool(),
        columns["response_mask"].bool(),
    )
    position_ids = is_real.cumsum(-1) - 1
    has_predictor = _responses(is_real, response_mask) & (_responses(position_ids, response_mask) > 0)
    unpredicted = response_mask & ~has_predictor
    if unpredicted.any():
        row = int(unpredicted.any(-1).nonzero()[0])
        raise BatchError(
            f"row {row}: response_mask is true for a token that is padding by attention_mask, or that follows no "
            "prompt; every counted response token must be real and have a real token before it."
        )
    return ids, is_real, response_mask, position_ids


def _responses(column: Tensor, response_mask: Tensor) -> Tensor:
    """Return the response part (rows, response_len) of a column (rows, seq_len)."""
    return column[:, column.shape[1] - response_mask.shape[1] :]


def _predictors(starts: Tensor, position_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Return the index of the hidden state before each counted response token; row r begins at starts[r]."""
    return (starts[:, None] + _responses(position_ids, response_mask) - 1)[response_mask]


def _places(response_mask: Tensor) -> Tensor:
    """Return the positions of the counted response tokens in the flattened mask, in row order."""
    return response_mask.flatten().nonzero().flatten()
