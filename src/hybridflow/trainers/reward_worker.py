"""The worker class for rewards, and the reward function that a Python program gave."""

from hybridflow.config import Config
from hybridflow.config.roles import has_own_pool
from hybridflow.controller import ClassWithInitArgs, Worker
from hybridflow.rewards.closure import closure_of
from hybridflow.workers import RewardModelWorker, RewardWorker, StreamedRewardWorker


def reward_worker(config: Config) -> ClassWithInitArgs:
    """Return the worker class for rewards, with the function that a Python program gave."""
    closure = closure_of(config.reward.function)
    more = {} if closure is None else {"closure": closure}
    return ClassWithInitArgs(reward_class(config), config=config, **more)


def reward_class(config: Config) -> type[Worker]:
    """Return the worker class for rewards: a reward model, or a reward function."""
    if config.reward.model_path:
        return RewardModelWorker
    return StreamedRewardWorker if config.trainer.stream and has_own_pool(config, "reward") else RewardWorker
