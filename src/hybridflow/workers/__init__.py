"""The roles: actor with or without rollout, rollout alone, critic, reference, reward, and the supervised policy."""

from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.actor_rollout import ActorRolloutWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward import RewardWorker
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.sft import SFTWorker

__all__ = [
    "ActorRolloutWorker",
    "ActorWorker",
    "CriticWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "RewardWorker",
    "RolloutWorker",
    "SFTWorker",
]
