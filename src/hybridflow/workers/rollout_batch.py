"""Completions as the tensors of a rollout batch: left-padded prompts followed by right-padded responses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hybridflow.data.tokenizer import pad_token_id
from hybridflow.errors import BatchError
from hybridflow.protocol import DataProto
from hybridflow.rollout import Completion


def rollouts_of(
    prompts: DataProto,
    completions: Sequence[Completion],
    group_size: int,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype = torch.float32,
) -> DataProto:
    """Return the columns of `ROLLOUT_COLUMNS`, `group_size` rows for each prompt; see `rollout_batch`."""
    source = torch.arange(len(prompts)).repeat_interleave(group_size)
    padding = pad_token_id(tokenizer)
    batch = rollout_batch(
        prompts.batch["prompts"][source], prompts.batch["prompt_mask"][source], completions, padding, dtype
    )
    texts = np.empty(len(completions), dtype=object)
    texts[:] = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    reasons = np.empty(len(completions), dtype=object)
    reasons[:] = [c.finish_reason for c in completions]
    return DataProto.from_dict(batch, {"solution_texts": texts, "finish_reasons": reasons}, {"pad_token_id": padding})


def rollout_batch(
    prompts: Tensor,
    prompt_mask: Tensor,
    completions: Sequence[Completion],
    pad_token_id: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return the tensor columns of `ROLLOUT_COLUMNS`, one row for each completion.

    prompts, prompt_mask: (batch, prompt_len), one row for each completion. `dtype`: dtype of the log-probs. Raises
    BatchError if there is no completion, or if prompts and completions differ in number.
    """
    if not completions or len(completions) != len(prompts):
        raise BatchError(
            f"got {len(completions)} completions for {len(prompts)} prompt rows; pass one prompt row for each "
            "completion, at least one."
        )

    def pad(values: list[list[int]] | list[list[float]], fill: float, dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(row, dtype=dtype) for row in values]
        return pad_sequence(rows, batch_first=True, padding_value=fill)

    responses = pad([c.token_ids for c in completions], pad_token_id, torch.int64)
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    response_mask = torch.arange(responses.shape[1]) < lengths[:, None]
    attention_mask = torch.cat([prompt_mask.to(torch.int64), response_mask.to(torch.int64)], dim=-1)
    return {
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=-1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "rollout_log_probs": pad([c.log_probs for c in completions], 0.0, dtype),
        "rollout_versions": pad([c.versions for c in completions], -1, torch.int64),
    }
