"""The whole configuration of a run, with properties that depend on several sections."""

from typing import Any

from hybridflow.config.sections.advice import AdviceConfig
from hybridflow.config.sections.base import Section
from hybridflow.config.sections.data import DataConfig, RewardConfig
from hybridflow.config.sections.generation import AgentConfig, EnvironmentConfig, RolloutConfig, ValidationConfig
from hybridflow.config.sections.learning import ActorConfig, AlgorithmConfig, CriticConfig, OfflineConfig
from hybridflow.config.sections.models import (
    DTypeName,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    ReferenceConfig,
    TeacherConfig,
)
from hybridflow.config.sections.run import ControllerConfig, PlacementConfig, RecoveryConfig, TrainerConfig


class Config(Section):
    """The configuration of a run: all sections."""

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
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    trainer: TrainerConfig = TrainerConfig()
    controller: ControllerConfig = ControllerConfig()
    placement: PlacementConfig = PlacementConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    advice: AdviceConfig = AdviceConfig()
    offline: OfflineConfig = OfflineConfig()

    def with_dtype(self, dtype: DTypeName) -> "Config":
        """Return the configuration with `dtype` in place of model.dtype = "auto"; any other dtype stays."""
        if self.model.dtype != "auto":
            return self
        return self.with_values("model", dtype=dtype)

    def with_values(self, section: str, **values: Any) -> "Config":
        """Return the configuration with other values of keys of a section, which are not checked again."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @property
    def extra_columns(self) -> frozenset[str]:
        """The columns among EXTRA_COLUMNS that the advantage estimator or the policy loss reads."""
        return frozenset((*self.algorithm.estimator.extra_columns, *self.actor.loss.extra_columns))

    @property
    def uses_critic(self) -> bool:
        """Whether the run trains a critic."""
        return "values" in self.extra_columns or self.critic.always

    @property
    def makes_one_update(self) -> bool:
        """Whether each batch makes exactly one optimizer step of the actor."""
        return self.actor.epochs == 1 and self.actor.mini_batch_size in (0, self.data.train_batch_size)

    @property
    def is_on_policy(self) -> bool:
        """Whether the probability ratio is 1 by definition: it compares with the policy of the only optimizer step."""
        return self.makes_one_update and self.actor.old_log_probs_from == "trainer"

    @property
    def learns_in_parts(self) -> bool:
        """Whether the actor adds the gradients of a streamed batch part by part, because nothing compares its parts."""
        compares = self.algorithm.estimator.compares_batch
        compares = getattr(self.algorithm, compares) if isinstance(compares, str) else compares
        needs_all = compares or self.algorithm.filter_groups or self.actor.loss.selection
        return self.trainer.stream and self.makes_one_update and not needs_all

    @property
    def corrects_rollouts(self) -> bool:
        """Whether importance weights or rejection correct for the log-prob mismatch of the sampler."""
        return self.algorithm.rollout_weights != "none" or bool(self.algorithm.rollout_reject)

    @property
    def replays_routes(self) -> bool:
        """Whether training takes the experts of the rollout engine; a run settles "auto" before it starts."""
        return self.actor.router_replay is True

    @property
    def uses_reference(self) -> bool:
        """Whether the run needs log-probs of a reference policy."""
        return self.algorithm.kl_in_reward or self.algorithm.kl_in_loss or "ref_log_probs" in self.extra_columns

    @property
    def rows_per_episode(self) -> int:
        """The number of rows of each response: 1, unless episodes may go on in further rows."""
        return (self.environment.max_rows or 1) if self.environment.classes else 1

    @property
    def uses_teacher(self) -> bool:
        """Whether the run distills from a teacher."""
        return bool(self.teacher.model_path)

    @property
    def has_rollout_pool(self) -> bool:
        """Whether generation runs in a separate pool, not in the processes that train."""
        roles, first = self.placement.roles, next(iter(self.placement.pools), None)
        return "rollout" in roles and roles["rollout"] != roles.get("actor_rollout", first)

    @property
    def updates_in_flight(self) -> bool:
        """Whether running sequences continue with new weights when these arrive."""
        return self.rollout.on_new_weights != "wait" and self.has_rollout_pool

    @property
    def actor_is_reference(self) -> bool:
        """Whether the actor with its adapters off is the reference, so that no separate model is loaded."""
        return self.lora.rank > 0 and not self.reference.model_path
