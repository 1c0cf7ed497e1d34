"""Models from a Hugging Face directory: a policy, or a critic with a scalar head on the same body.

No code of the directory is ever executed. Dropout is off: a token's log-probability must not depend on
which pass computed it.
"""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hybridflow.errors import ModelError
from hybridflow.models.attention import ATTENTION

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_causal_lm(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The policy of a directory, in `dtype`, with hybridflow's attention.

    Raises ModelError if the directory is missing, is no causal language model, or its attention cannot be planned.
    """
    return _load(AutoModelForCausalLM, path, dtype)


def load_value_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The body of a causal language model with a linear head giving one value per token; a new head starts at zero."""
    model = _load(AutoModelForTokenClassification, path, dtype, num_labels=1, classifier_dropout=0.0)
    if "score" not in "".join(_stored_names(Path(path))):
        with torch.no_grad():
            for parameter in model.score.parameters():
                parameter.zero_()
    return model


def _load(auto_class: type, path: str | Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"'{path}' is no model directory: config.json is missing. Give a local Hugging Face directory as model.path."
        )
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a missing value head is expected, not a warning
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, **options)
        model = auto_class.from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"'{path}' cannot be loaded as a {auto_class.__name__.removeprefix('AutoModelFor')} model: {error}"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    _require_plannable_attention(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model


def _require_plannable_attention(model: PreTrainedModel) -> None:
    layer_types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if not getattr(model, "_supports_attention_backend", False) or layer_types != {"full_attention"}:
        raise ModelError(
            f"{model.config.model_type} models (layers: {', '.join(sorted(layer_types))}) are not supported; "
            "use a model with full causal attention such as Llama, Qwen2 or Qwen3."
        )


def _stored_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return list(json.loads(index.read_text())["weight_map"])
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return list(file.keys())
