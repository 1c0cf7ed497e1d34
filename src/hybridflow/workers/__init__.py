"""The roles: actor, rollout, both, critic, reference, teacher, reward, and what learns from given data."""

from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.actor_rollout import ActorRolloutWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.preference_model import PreferenceModelWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward import RewardWorker
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.sft import SFTWorker
from hybridflow.workers.teacher import TeacherWorker

__all__ = [
    "ActorRolloutWorker",
    "ActorWorker",
    "CriticWorker",
    "PreferenceModelWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "RewardWorker",
    "RolloutWorker",
    "SFTWorker",
    "TeacherWorker",
]
