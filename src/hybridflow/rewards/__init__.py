"""Rewards: rule-based functions, a user's own function, and the scorer that runs either on a batch of responses."""

from hybridflow.rewards.arithmetic import ExpressionError, evaluate_arithmetic
from hybridflow.rewards.countdown import countdown_reward
from hybridflow.rewards.gsm8k import gsm8k_flexible_reward, gsm8k_reward
from hybridflow.rewards.multiplication import multiplication_reward
from hybridflow.rewards.runner import Outcome, RewardRunner
from hybridflow.rewards.scorer import RewardResult, RewardScorer
from hybridflow.rewards.table import ANSWERS, REWARDS, RewardFunction
from hybridflow.rewards.user import load_reward_function

__all__ = [
    "ANSWERS",
    "REWARDS",
    "ExpressionError",
    "Outcome",
    "RewardFunction",
    "RewardResult",
    "RewardRunner",
    "RewardScorer",
    "countdown_reward",
    "evaluate_arithmetic",
    "gsm8k_flexible_reward",
    "gsm8k_reward",
    "load_reward_function",
    "multiplication_reward",
]
