"""The worker class of each role of a run."""

from typing import Any

from hybridflow.config import Config
from hybridflow.config.roles import has_own_pool
from hybridflow.controller import ClassWithInitArgs, Role, Worker
from hybridflow.environments.processes.closure import ENVIRONMENT, closure_of
from hybridflow.trainers.build.groups import traits_of
from hybridflow.workers import (
    ActorRolloutWorker,
    ActorWorker,
    CriticWorker,
    InFlightRolloutWorker,
    ReferenceWorker,
    RewardModelWorker,
    RewardWorker,
    RolloutWorker,
    StreamedRewardWorker,
    TeacherWorker,
)


def reward_worker(config: Config) -> ClassWithInitArgs:
    """Return the worker class for rewards, with the function that a Python program gave."""
    closure = None if config.environment.classes else closure_of(config.reward.function)
    more = {} if closure is None else {"closure": closure}
    return ClassWithInitArgs(reward_class(config), config=config, **more)


def reward_class(config: Config) -> type[Worker]:
    """Return the worker class for rewards: a reward model, or a reward function."""
    if config.reward.model_path:
        return RewardModelWorker
    return StreamedRewardWorker if config.trainer.stream and has_own_pool(config, "reward") else RewardWorker


def environment_closures(config: Config) -> dict[str, Any]:
    """Return the argument `environments` of workers that generate: classes, and their reward, of a Python program."""
    found = [closure_of(source, ENVIRONMENT) for source in config.environment.classes.values()]
    found += [closure_of(config.reward.function)] if found else []
    given = tuple(each for each in found if each)
    return {"environments": given} if given else {}


def role_classes(config: Config, actor_updates: int = 1, critic_updates: int = 1) -> dict[Role, ClassWithInitArgs]:
    """Return the worker class of each role that the configuration uses.

    Learning-rate schedules end after `actor_updates` and `critic_updates`.
    """
    actor = ActorWorker if config.has_rollout_pool else ActorRolloutWorker
    rollout = InFlightRolloutWorker if config.updates_in_flight else RolloutWorker
    given = environment_closures(config)
    own = given if actor is ActorRolloutWorker else {}  # who trains only plays no episodes
    classes = {
        Role.ActorRollout: ClassWithInitArgs(actor, config=config, total_updates=actor_updates, **own),
        Role.Reward: reward_worker(config),
        Role.Rollout: ClassWithInitArgs(rollout, config=config, **given),
        Role.Critic: ClassWithInitArgs(CriticWorker, config=config, total_updates=critic_updates),
        Role.RefPolicy: ClassWithInitArgs(ReferenceWorker, config=config),
        Role.Teacher: ClassWithInitArgs(TeacherWorker, config=config),
    }
    return {role: worker for role, worker in classes.items() if traits_of(role).has_group(config)}
