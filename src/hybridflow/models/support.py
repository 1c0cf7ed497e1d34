"""Kinds of models that are refused by their configuration; `trainers.family_check` computes what others do."""

from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hybridflow.errors import ModelError

FUSED_FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the families with a fused forward pass: pre-norm layers of full attention with rotary embeddings and
a gated SiLU, with or without biases."""

USE_INSTEAD = "use a model with causal attention such as Llama, Qwen2 or Qwen3."


def require_supported_config(config: PretrainedConfig) -> None:
    """Raise ModelError for an unsupported configuration, before any weights are read."""
    text = config.get_text_config()
    kind = config.model_type
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ModelError(
            f"{kind} models are masked language models, but a causal language model is required; {USE_INSTEAD}"
        )
    if getattr(text, "is_heterogeneous", False):
        raise ModelError(f"{kind} models with layers of different sizes are not supported; {USE_INSTEAD}")


def require_classifier(config: PretrainedConfig, auto_class: Any) -> None:
    """Raise ModelError if transformers has no class of such models with a scalar head."""
    if type(config) not in auto_class._model_mapping:
        kind = auto_class.__name__.removeprefix("AutoModelFor")
        raise ModelError(
            f"{config.model_type} models cannot be a critic or a reward model: transformers has no {kind} class of "
            f"them; {USE_INSTEAD}"
        )


def has_angles_of_length(config: PretrainedConfig) -> bool:
    """Whether rotary angles depend on the longest sequence of a call if it has more than `num_positions` tokens."""
    return any(rope.get("rope_type") in ("dynamic", "longrope") for rope in _ropes(config))


def num_positions(config: PretrainedConfig) -> int | None:
    """Return the most tokens of a sequence, up to which a row's angles do not depend on others; None: no limit."""
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None)]
    ropes = (rope for rope in _ropes(config) if rope.get("rope_type") == "longrope")
    limits += [rope.get("original_max_position_embeddings") for rope in ropes]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def describe_positions(config: PretrainedConfig) -> str:
    """Return the number of positions for an error, and why `max_position_embeddings` may be larger."""
    why = " (beyond them, its rotary angles depend on the longest sequence of a batch)"
    return f"{num_positions(config)} positions{why * has_angles_of_length(config)}"


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the settings of rotary angles: one, or one for each kind of layer."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [each for each in (rope, *rope.values()) if isinstance(each, dict)]
