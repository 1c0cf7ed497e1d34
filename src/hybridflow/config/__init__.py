"""Configuration of a run: frozen sections, a loader that reports all problems at once, a reference of all keys."""

from hybridflow.config.checks import check
from hybridflow.config.keys import leaf_keys, nearest_key
from hybridflow.config.load import load_config
from hybridflow.config.render import reference_markdown, reference_text, refusals_markdown, to_toml
from hybridflow.config.sections.base import RoleName, Section
from hybridflow.config.sections.config import Config
from hybridflow.config.sections.data import DataConfig, RewardConfig
from hybridflow.config.sections.generation import AgentConfig, EnvironmentConfig, RolloutConfig, ValidationConfig
from hybridflow.config.sections.learning import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    OfflineConfig,
    OptimizerConfig,
)
from hybridflow.config.sections.models import (
    DTypeName,
    LoRAConfig,
    MemoryConfig,
    ModelConfig,
    OffloadName,
    ParallelConfig,
    ReferenceConfig,
    TeacherConfig,
)
from hybridflow.config.sections.run import ControllerConfig, PlacementConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "Config",
    "ControllerConfig",
    "CriticConfig",
    "DTypeName",
    "DataConfig",
    "EnvironmentConfig",
    "LoRAConfig",
    "MemoryConfig",
    "ModelConfig",
    "OfflineConfig",
    "OffloadName",
    "OptimizerConfig",
    "ParallelConfig",
    "PlacementConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RoleName",
    "RolloutConfig",
    "Section",
    "TeacherConfig",
    "TrainerConfig",
    "ValidationConfig",
    "check",
    "leaf_keys",
    "load_config",
    "nearest_key",
    "reference_markdown",
    "reference_text",
    "refusals_markdown",
    "to_toml",
]
