"""The whole configuration: every section, and what follows from several of them."""

from hybridflow.config.sections.base import Section
from hybridflow.config.sections.data import DataConfig, RewardConfig
from hybridflow.config.sections.generation import RolloutConfig, ValidationConfig
from hybridflow.config.sections.learning import ActorConfig, AlgorithmConfig, CriticConfig, OfflineConfig
from hybridflow.config.sections.models import (
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    ReferenceConfig,
    TeacherConfig,
)
from hybridflow.config.sections.run import ControllerConfig, PlacementConfig, TrainerConfig


class Config(Section):
    """A whole run."""

    model: ModelConfig = ModelConfig()
    lora: LoRAConfig = LoRAConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    validation: ValidationConfig = ValidationConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    controller: ControllerConfig = ControllerConfig()
    placement: PlacementConfig = PlacementConfig()
    offline: OfflineConfig = OfflineConfig()

    @property
    def extra_columns(self) -> frozenset[str]:
        """Which of EXTRA_COLUMNS the advantage estimator or the policy loss reads."""
        return frozenset((*self.algorithm.estimator.extra_columns, *self.actor.loss.extra_columns))

    @property
    def uses_critic(self) -> bool:
        return "values" in self.extra_columns or self.critic.always

    @property
    def is_on_policy(self) -> bool:
        """Whether each batch gives exactly one optimizer step, so that the ratio is 1 by definition."""
        one_step = self.actor.epochs == 1 and self.actor.mini_batch_size in (0, self.data.train_batch_size)
        return one_step and self.actor.old_log_probs_from == "trainer"

    @property
    def corrects_rollouts(self) -> bool:
        """Whether samples are weighed or rejected for the policy that made them."""
        return self.algorithm.rollout_weights != "none" or bool(self.algorithm.rollout_reject)

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.kl_in_reward or self.algorithm.kl_in_loss or "ref_log_probs" in self.extra_columns

    @property
    def uses_teacher(self) -> bool:
        return bool(self.teacher.model_path)

    @property
    def has_rollout_pool(self) -> bool:
        """Whether others than the ranks that learn generate."""
        roles, first = self.placement.roles, next(iter(self.placement.pools), None)
        return "rollout" in roles and roles["rollout"] != roles.get("actor_rollout", first)

    @property
    def actor_is_reference(self) -> bool:
        """Whether the actor without its adapters is the reference, so that no other model is needed."""
        return self.lora.rank > 0 and not self.reference.model_path
