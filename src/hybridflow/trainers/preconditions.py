"""What a configuration must have before anything is built from it, said before anything slow begins."""

import json
from pathlib import Path

from hybridflow.config import Config
from hybridflow.data import RLHFDataset
from hybridflow.errors import ConfigError, DataError, ModelError
from hybridflow.rollout.vllm import require_vllm


def require_files(config: Config, *file_keys: str) -> None:
    """Raise ConfigError unless model.path and each of `file_keys` (of the section `data`) are set.

    Raises ModelError unless every model directory that the configuration names is one.
    """
    values = {"model.path": config.model.path}
    values |= {key: getattr(config.data, key.removeprefix("data.")) for key in file_keys}
    if missing := [key for key, value in values.items() if not value]:
        raise ConfigError(
            f"{' and '.join(missing)} must be set; set it in the recipe or as KEY=VALUE on the command line."
        )
    models = {"model.path": config.model.path}
    if config.uses_critic:
        models["critic.model_path"] = config.critic.model_path
    if config.uses_reference:
        models["reference.model_path"] = config.reference.model_path
    if config.reward.model_path:
        models["reward.model_path"] = config.reward.model_path
    for key, path in models.items():
        if path and not (Path(path) / "config.json").is_file():
            raise ModelError(
                f"{key}='{path}' is no model directory: config.json is missing. Give a local Hugging Face directory; "
                "nothing is downloaded."
            )


def require_positions(config: Config, prompts: RLHFDataset) -> None:
    """Raise DataError if the longest prompt and response together exceed the positions of the policy."""
    settings = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    positions, longest = settings.get("max_position_embeddings"), prompts.longest_prompt
    if isinstance(positions, int) and longest + config.data.max_response_length > positions:
        raise DataError(
            f"the longest prompt has {longest} tokens and data.max_response_length={config.data.max_response_length}, "
            f"but the model has {positions} positions; lower one of the limits."
        )


def require_one_rank(config: Config) -> None:
    """Raise ConfigError if an update would need ranks that can meet and the backend has them take turns."""
    if config.controller.backend == "local" and config.controller.num_workers > 1:
        raise ConfigError(
            f"controller.num_workers={config.controller.num_workers} with controller.backend='local' runs ranks one "
            "after another, so an update could not sum their gradients; train with controller.backend = 'ray', or with "
            "num_workers = 1 (generating and evaluating work with any number)."
        )


def require_rollout_engine(config: Config) -> None:
    """Raise RolloutError if this process is to generate with vLLM and has none. Workers on Ray have an environment that
    may be another."""
    if config.rollout.backend == "vllm" and config.controller.backend == "local":
        require_vllm()
