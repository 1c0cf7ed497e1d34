"""The configuration of a run: frozen sections, a loader that reports every problem, a reference of all keys."""

from hybridflow.config.checks import check
from hybridflow.config.keys import leaf_keys, nearest_key
from hybridflow.config.load import load_config
from hybridflow.config.render import reference_markdown, reference_text, to_toml
from hybridflow.config.sections import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    ControllerConfig,
    CriticConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OffloadName,
    OptimizerConfig,
    ParallelConfig,
    PlacementConfig,
    ReferenceConfig,
    RewardConfig,
    RoleName,
    RolloutConfig,
    Section,
    SFTConfig,
    TrainerConfig,
    ValidationConfig,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "Config",
    "ControllerConfig",
    "CriticConfig",
    "DataConfig",
    "MemoryConfig",
    "ModelConfig",
    "OffloadName",
    "OptimizerConfig",
    "ParallelConfig",
    "PlacementConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RoleName",
    "RolloutConfig",
    "SFTConfig",
    "Section",
    "TrainerConfig",
    "ValidationConfig",
    "check",
    "leaf_keys",
    "load_config",
    "nearest_key",
    "reference_markdown",
    "reference_text",
    "to_toml",
]
