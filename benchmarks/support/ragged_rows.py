"""Rows on which an error in a policy loss is visible: different lengths, ratios other than 1, a distant reference."""

import torch
from torch import Tensor

PROMPT_LENGTHS = (6, 2, 4, 3)
RESPONSE_LENGTHS = (12, 3, 1, 7, 12, 2, 9, 5, 1, 4, 11, 6, 8, 2, 10, 3)
"""One length per row; each prompt has four responses."""
LOG_RATIOS = (-0.5, -0.05, 0.05, 0.4, 1.0)
"""Logarithms of new / old probability: below, inside, above the clip range of 0.2, and beyond a dual clip of 2.0."""


def draw_ragged_rows(vocab_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Draw rows of random tokens, without 0, the padding token.

    Returns `prompt_ids` and `prompt_mask` (rows, prompt_len), padded on the left, `completion_ids` and
    `completion_mask` (rows, response_len), padded on the right, all int64, and `advantages` (rows,): the names of TRL.
    """
    generator = torch.Generator().manual_seed(seed)
    group_size = len(RESPONSE_LENGTHS) // len(PROMPT_LENGTHS)
    prompt_len, response_len = max(PROMPT_LENGTHS), max(RESPONSE_LENGTHS)
    prompt_mask = (torch.arange(prompt_len).flip(0) < torch.tensor(PROMPT_LENGTHS)[:, None]).long()
    completion_mask = (torch.arange(response_len) < torch.tensor(RESPONSE_LENGTHS)[:, None]).long()
    prompt_ids = torch.randint(1, vocab_size, prompt_mask.shape, generator=generator) * prompt_mask
    completion_ids = torch.randint(1, vocab_size, completion_mask.shape, generator=generator) * completion_mask
    return {
        "prompt_ids": prompt_ids.repeat_interleave(group_size, dim=0),
        "prompt_mask": prompt_mask.repeat_interleave(group_size, dim=0),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.randn(len(RESPONSE_LENGTHS), generator=generator),
    }


def with_distant_policies(rows: dict[str, Tensor], log_probs: Tensor, seed: int = 1) -> dict[str, Tensor]:
    """Add `old_per_token_logps` and `ref_per_token_logps` (rows, response_len) to rows whose log-probs are `log_probs`.

    Each token's ratio to the old policy is one of LOG_RATIOS; the reference differs by normal noise.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(LOG_RATIOS), log_probs.shape, generator=generator)
    noise = 0.5 * torch.randn(log_probs.shape, generator=generator)
    return {
        **rows,
        "old_per_token_logps": log_probs - torch.tensor(LOG_RATIOS)[drawn],
        "ref_per_token_logps": log_probs + noise,
    }
