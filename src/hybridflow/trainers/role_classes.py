"""The worker class of each role of a run."""

from hybridflow.config import Config
from hybridflow.controller import ClassWithInitArgs, Role
from hybridflow.trainers.environment_closures import environment_closures
from hybridflow.trainers.groups import traits_of
from hybridflow.trainers.reward_worker import reward_worker
from hybridflow.workers import (
    ActorRolloutWorker,
    ActorWorker,
    CriticWorker,
    InFlightRolloutWorker,
    ReferenceWorker,
    RolloutWorker,
    TeacherWorker,
)


def role_classes(config: Config, actor_updates: int = 1, critic_updates: int = 1) -> dict[Role, ClassWithInitArgs]:
    """Return the worker class of each role that the configuration uses.

    Learning-rate schedules end after `actor_updates` and `critic_updates`.
    """
    actor, given = actor_class(config), environment_closures(config)
    own = given if actor is ActorRolloutWorker else {}  # who trains only plays no episodes
    classes = {
        Role.ActorRollout: ClassWithInitArgs(actor, config=config, total_updates=actor_updates, **own),
        Role.Reward: reward_worker(config),
        Role.Rollout: ClassWithInitArgs(rollout_class(config), config=config, **given),
        Role.Critic: ClassWithInitArgs(CriticWorker, config=config, total_updates=critic_updates),
        Role.RefPolicy: ClassWithInitArgs(ReferenceWorker, config=config),
        Role.Teacher: ClassWithInitArgs(TeacherWorker, config=config),
    }
    return {role: worker for role, worker in classes.items() if traits_of(role).has_group(config)}


def actor_class(config: Config) -> type[ActorWorker]:
    """Return the worker class of the processes that train the policy."""
    return ActorWorker if config.has_rollout_pool else ActorRolloutWorker


def rollout_class(config: Config) -> type[RolloutWorker]:
    """Return the worker class of a pool that generates."""
    return InFlightRolloutWorker if config.updates_in_flight else RolloutWorker
