"""The workers of each role: actor, rollout, both, critic, reference, teacher, reward, and offline training."""

from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.actor_rollout import ActorRolloutWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.in_flight import InFlightRolloutWorker
from hybridflow.workers.offline import OfflinePolicyWorker, PreferenceModelWorker
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward import RewardWorker
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.streamed_reward import StreamedRewardWorker
from hybridflow.workers.teacher import TeacherWorker

__all__ = [
    "ActorRolloutWorker",
    "ActorWorker",
    "CriticWorker",
    "InFlightRolloutWorker",
    "OfflinePolicyWorker",
    "PreferenceModelWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "RewardWorker",
    "RolloutWorker",
    "StreamedRewardWorker",
    "TeacherWorker",
]
