"""Checks of supported models: every layer must compute its attention by the attention plan, and only by it."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hybridflow.errors import ModelError
from hybridflow.models.attention import PackedPlan
from hybridflow.models.attention_form import AttentionForm
from hybridflow.models.recurrence import Recurrence

FUSED_FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the families with a fused forward pass: pre-norm layers of full attention with rotary embeddings and
a gated SiLU, with or without biases."""

LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv"}
"""Names of `layer_types` in configurations whose layers ask the attention plan."""

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
    if others := sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES):
        raise ModelError(f"{kind} models with layers of type {', '.join(others)} are not supported; {USE_INSTEAD}")
    if has_angles_of_length(text):
        rope_type = text.rope_parameters["rope_type"]
        raise ModelError(f"{kind} models with rope_type={rope_type!r} are not supported; {USE_INSTEAD}")


def require_classifier(config: PretrainedConfig, auto_class: Any) -> None:
    """Raise ModelError if transformers has no class of such models with a scalar head."""
    if type(config) not in auto_class._model_mapping:
        kind = auto_class.__name__.removeprefix("AutoModelFor")
        raise ModelError(
            f"{config.model_type} models cannot be a critic or a reward model: transformers has no {kind} class of "
            f"them; {USE_INSTEAD}"
        )


def has_angles_of_length(config: PretrainedConfig) -> bool:
    """Whether rotary angles depend on the longest sequence of a call, so that log-probs depend on other rows."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")


def require_planned_attention(model: PreTrainedModel) -> None:
    """Run two tokens through the model, and raise ModelError unless each layer calls the attention plan once."""
    kind, plan = model.config.model_type, _Recording()
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ModelError(f"{kind} models are not supported: their code does not take position_ids; {USE_INSTEAD}")
    zeros = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad():
            model(zeros, position_ids=zeros, attention_plan=plan, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the code of some families fails in its own way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{kind} models are not supported ({reason[:300]}); {USE_INSTEAD}") from error
    num_layers = model.config.get_text_config().num_hidden_layers
    if plan.layers != list(range(num_layers)):
        raise ModelError(
            f"{kind} models are not supported: {len(set(plan.layers))} of {num_layers} layers use a supported "
            f"attention, each once; {USE_INSTEAD}"
        )


class _Recording:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        self.layers.append(layer)
        return PackedPlan(((2, 1),)).attend(layer, query, key, value, form)

    def recur(self, layer: int, hidden: Tensor, compute: Recurrence) -> Tensor:
        self.layers.append(layer)
        return compute(hidden, None)
