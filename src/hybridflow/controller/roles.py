"""The roles a worker group can play in a run; a resource pool is assigned to each (see `ResourcePoolManager`)."""

from enum import Enum


class Role(Enum):
    """What a worker group is for. The value is the name shown in logs and errors."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "reference"
    Teacher = "teacher"
    RewardModel = "reward_model"
    Reward = "reward"
