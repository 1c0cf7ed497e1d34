"""The roles of worker groups in a run; each is assigned a resource pool (see `ResourcePoolManager`)."""

from enum import Enum


class Role(Enum):
    """The role of a worker group. The value is the name shown in logs and errors."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "reference"
    Teacher = "teacher"
    RewardModel = "reward_model"
    Reward = "reward"
