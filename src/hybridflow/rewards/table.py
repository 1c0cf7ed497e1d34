"""Which reward function scores the rows of which data source."""

from collections.abc import Callable, Mapping
from typing import Any

from hybridflow.rewards.countdown import countdown_reward
from hybridflow.rewards.gsm8k import gsm8k_reward
from hybridflow.rewards.multiplication import multiplication_reward

# Called with the keyword arguments data_source, solution_str, ground_truth, extra_info.
RewardFunction = Callable[..., float | Mapping[str, Any]]

REWARDS: dict[str, RewardFunction] = {
    "openai/gsm8k": gsm8k_reward,
    "countdown": countdown_reward,
    "multiplication": multiplication_reward,
}
