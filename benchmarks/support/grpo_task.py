"""One GRPO step as both sides make it: sizes, learning rate, reward. Standard library only, since TRL's side reads it.

hybridflow loads `reward` by the name of this file, as it does any reward function of a user's own.
"""

from collections.abc import Sequence
from typing import Any

PROMPTS_PER_STEP = 32
GROUP_SIZE = 8
PROMPT_LEN = 6
NEW_TOKENS = 32
"""Of each response, exactly."""
LEARNING_RATE = 1e-4
NUM_PROMPTS = 512
"""In the training data, which is gone through again and again."""
ENDLESS_STEPS = 1_000_000
"""What both trainers are told; they make one step for each request."""


def score(token_ids: Sequence[int]) -> float:
    """A number from 0 to 6 that costs nothing to compute and differs within a group."""
    return float(sum(token_ids) % 7)


def reward(solution_str: str, **_: Any) -> float:
    """hybridflow's reward function: words are token ids (`models.write_tokenizer`); the missing padding is 0."""
    return score([int(word) for word in solution_str.split()])
