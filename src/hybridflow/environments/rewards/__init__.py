"""Rewards: the built-in reward functions, the loader of a user's function, and the scorer that runs either on a batch.

Names that need torch are imported at first use, so that a reward process starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hybridflow.environments.code.code_tests import code_reward
from hybridflow.environments.rewards.answer_text import gsm8k_flexible_reward, gsm8k_reward, multiplication_reward
from hybridflow.environments.rewards.arithmetic import ExpressionError, countdown_reward, evaluate_arithmetic
from hybridflow.environments.rewards.http_reward import http_reward
from hybridflow.environments.rewards.judge import judge_reward
from hybridflow.environments.rewards.math_answer import boxed_answer, math_reward
from hybridflow.environments.rewards.multiple_choice import chosen_letter, multiple_choice_reward
from hybridflow.environments.rewards.shaping import format_score, length_score, shaped_reward
from hybridflow.environments.rewards.table import ANSWERS, REWARDS, RewardFunction, no_reward

if TYPE_CHECKING:
    from hybridflow.environments.processes.arguments import load_reward_function
    from hybridflow.environments.processes.reward_runner import RewardRunner
    from hybridflow.environments.rewards.outcome import Outcome
    from hybridflow.environments.rewards.scorer import RewardScorer
    from hybridflow.environments.rewards.scores import RewardResult

__all__ = [
    "ANSWERS",
    "REWARDS",
    "ExpressionError",
    "Outcome",
    "RewardFunction",
    "RewardResult",
    "RewardRunner",
    "RewardScorer",
    "boxed_answer",
    "chosen_letter",
    "code_reward",
    "countdown_reward",
    "evaluate_arithmetic",
    "format_score",
    "gsm8k_flexible_reward",
    "gsm8k_reward",
    "http_reward",
    "judge_reward",
    "length_score",
    "load_reward_function",
    "math_reward",
    "multiple_choice_reward",
    "multiplication_reward",
    "no_reward",
    "shaped_reward",
]

_HOMES = {
    "Outcome": "hybridflow.environments.rewards.outcome",
    "RewardRunner": "hybridflow.environments.processes.reward_runner",
    "RewardResult": "hybridflow.environments.rewards.scores",
    "RewardScorer": "hybridflow.environments.rewards.scorer",
    "load_reward_function": "hybridflow.environments.processes.arguments",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hybridflow.environments.rewards' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
