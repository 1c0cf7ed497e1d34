"""The GRPO step that both sides run: sizes, learning rate, reward. Standard library only: TRL's side imports it.

hybridflow loads `reward` from this file by name, as it loads any user's reward function.
"""

from collections.abc import Sequence
from typing import Any

PROMPTS_PER_STEP = 32
GROUP_SIZE = 8
PROMPT_LEN = 6
NEW_TOKENS = 32
"""Exact length of each response."""
SIZES = {
    "prompts_per_step": PROMPTS_PER_STEP,
    "group_size": GROUP_SIZE,
    "prompt_len": PROMPT_LEN,
    "new_tokens": NEW_TOKENS,
    "accumulation": 1,
}
"""The sizes of a step; `accumulation`: parts into which TRL splits its update."""
LEARNING_RATE = 1e-4
NUM_PROMPTS = 512
"""Prompts in the training data, which is repeated."""
ENDLESS_STEPS = 1_000_000
"""The number of steps that both trainers are configured with; they run one step for each request."""


def score(token_ids: Sequence[int]) -> float:
    """Return a number from 0 to 6 that costs almost nothing to compute and differs within a group."""
    return float(sum(token_ids) % 7)


def reward(solution_str: str, **_: Any) -> float:
    """Score a response of hybridflow: its words are token ids (`models.write_tokenizer`); missing padding counts 0."""
    return score([int(word) for word in solution_str.split()])
