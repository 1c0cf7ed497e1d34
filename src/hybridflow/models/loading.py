"""Loading models from a Hugging Face directory: a policy, or a critic with a scalar head on the same body.

A model is built on the meta device, then filled one parameter at a time: a rank of a sharded model holds at most its
shards and one whole parameter; of experts that are stored one by one it reads only its own. Code in the directory is
not executed. Dropout is off: a token's log-prob must not depend on the pass that computes it.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from hybridflow.errors import ModelConfigError, ModelError
from hybridflow.models.attention import ATTENTION
from hybridflow.models.experts import choose_products
from hybridflow.models.lora import is_adapter, plain_name
from hybridflow.models.model_files import LOADING_ERRORS, require_finite, require_sound_config
from hybridflow.models.parameters import part_like, persistent_buffers, replace_parameters
from hybridflow.models.quantized_weights import QUANTIZED, quantized_form
from hybridflow.models.recurrence import plan_recurrences
from hybridflow.models.stored_model import ModelTensors, StoredModel
from hybridflow.models.support import (
    USE_INSTEAD,
    require_classifier,
    require_supported_config,
)
from hybridflow.runtime.boxes import box_of_shard, local, whole_box
from hybridflow.runtime.observe import get_logger

Head = Literal["policy", "value"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_OF_LAYER = re.compile(r"(^|\.)layers\.\d+\.")

HEADS = ("lm_head.", "score.")
"""Prefixes of the heads' parameters: `lm_head.` of a policy, `score.` of a critic."""

VALUE_HEAD = "score."
VALUE_MODEL = {"num_labels": 1, "classifier_dropout": 0.0}
"""Configuration keys of a critic besides those of its body."""

logger = get_logger(__name__)


def load_causal_lm(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the policy of a directory in `dtype`, with hybridflow's attention.

    Raises ModelError if the directory is missing, incomplete or damaged, is not a causal language model, or uses an
    unsupported attention.
    """
    return _load(path, "policy", dtype)


def load_value_model(path: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the body of a causal language model with a linear head for one value per token; a new head is zero.

    Raises ModelError as `load_causal_lm` does.
    """
    return _load(path, "value", dtype)


def _load(path: str | Path, head: Head, dtype: torch.dtype) -> PreTrainedModel:
    model = build_without_weights(path, head, dtype)
    replace_parameters(model, lambda _, parameter: nn.Parameter(torch.empty_like(parameter, device="cpu")))
    load_shards(model, path)
    return model


def build_without_weights(path: str | Path, head: Head, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a directory with parameters of `dtype` on the meta device; buffers have contents.

    Raises ModelError as `load_causal_lm` does, for unsupported configurations.
    """
    auto_class: Any = AutoModelForCausalLM if head == "policy" else AutoModelForTokenClassification
    if head == "policy":
        require_language_model(path)
    try:
        with quiet_transformers(), no_init_weights(), parameters_on_meta():
            config = read_config(path, **({} if head == "policy" else VALUE_MODEL))
            model = auto_class.from_config(config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False)
    except LOADING_ERRORS as error:
        raise cannot_be_loaded(path, auto_class, error) from error
    if head == "value":
        require_value_head(model)
    choose_products(model)
    model.tie_weights()
    turn_off_dropout(model)
    plan_recurrences(model)
    return model.eval()


def build_with_placeholders(path: str | Path, head: Head, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the model on `device` with placeholders, which take no memory until `data` of a parameter is assigned.

    Persistent buffers, which do not learn, have the contents of the directory.
    """
    model = build_without_weights(path, head, dtype)
    if persistent_buffers(model):
        with StoredModel(path) as stored:
            load_buffers(model, ModelTensors(model, stored))
    replace_parameters(
        model, lambda _, parameter: nn.Parameter(placeholder(parameter.shape, dtype, device), requires_grad=False)
    )
    for module in model.modules():
        module._buffers = {
            name: buffer if buffer is None else buffer.to(device) for name, buffer in module._buffers.items()
        }
    return model


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zero tensor of this shape that occupies the memory of one element."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


@torch.no_grad()
def load_shards(model: PreTrainedModel, path: str | Path) -> None:
    """Fill the parameters, or this rank's shards of them, from the safetensors files of the directory.

    A value head that is not stored becomes zero. Raises ModelError if files or weights are missing, damaged or have a
    wrong shape.
    """
    has_tied_head = model.get_output_embeddings() is not None and is_tied(model.config)
    with StoredModel(path, is_tied=has_tied_head) as files:
        stored = ModelTensors(model, files)
        parameters = {name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
        missing = {name for name in parameters if plain_name(name) not in stored}
        require_complete(path, (name for name in missing if not name.startswith(VALUE_HEAD)))
        load_buffers(model, stored)
        for name, parameter in parameters.items():
            if name in missing:
                local(parameter).zero_()
                continue
            require_shape(path, name, stored.shape(plain_name(name)), parameter.shape)
            experts = _experts_of_rank(stored, plain_name(name), parameter)
            read = (stored.read(plain_name(name)) if experts is None else experts).to(parameter.dtype)
            require_finite(path, name, read)
            local(parameter).copy_(part_like(read, parameter) if experts is None else read)
        require_no_ignored_layer(path, stored.ignored, model._keys_to_ignore_on_load_unexpected or ())


def _experts_of_rank(stored: ModelTensors, name: str, parameter: Tensor) -> Tensor | None:
    """Read the experts of this rank's shard alone; None if it is not some of the matrices of a stack."""
    (first, end), *others = box_of_shard(parameter)
    is_some = end - first < len(parameter) and tuple(others) == whole_box(parameter.shape[1:])
    return stored.read_experts(name, first, end) if is_some else None


def load_buffers(model: PreTrainedModel, stored: ModelTensors) -> None:
    """Fill the persistent buffers, such as the bias of a router, in the dtype of a model loaded by transformers."""
    buffers = persistent_buffers(model)
    require_complete(stored.path, (name for name in buffers if name not in stored))
    for name, buffer in buffers.items():
        require_shape(stored.path, name, stored.shape(name), buffer.shape)
        in_float32 = any(part in name for part in model._keep_in_fp32_modules_strict or ())
        whole = stored.read(name).to(buffer.device, torch.float32 if in_float32 else buffer.dtype)
        require_finite(stored.path, name, whole)
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, whole)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Register parameters of modules on the meta device inside the context, so that they take no memory."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def read_config(path: str | Path, **options: object) -> PretrainedConfig:
    """Read the configuration of a model directory; `options` replace keys. Raises ModelError if it is unsupported."""
    if not os.path.exists(Path(path) / "config.json"):  # False also for a name that is too long
        quantized_form(path)
        raise ModelConfigError(
            f"'{path}' is not a model directory: config.json not found; give a Hugging Face directory as model.path."
        )
    require_sound_config(path)
    config = AutoConfig.from_pretrained(Path(path), trust_remote_code=False, **options)
    vars(config).pop(QUANTIZED, None)  # `StoredModel` dequantizes
    require_supported_config(config)
    if "num_labels" in options:
        require_classifier(config, AutoModelForTokenClassification)
    return config


def require_value_head(model: PreTrainedModel) -> None:
    """Raise ModelError unless the head of a critic has the name by which heads are trained, stored and exported."""
    if not hasattr(model, VALUE_HEAD.rstrip(".")):
        raise ModelError(
            f"{model.config.model_type} models cannot be a critic or a reward model: their head is not named "
            f"{VALUE_HEAD.rstrip('.')}; {USE_INSTEAD}"
        )


def require_language_model(path: str | Path) -> None:
    """Raise ModelError if config.json names a classifier, such as a reward model.

    With tied embeddings its weights would load as those of a policy.
    """
    file = Path(path) / "config.json"
    if not os.path.exists(file):
        return
    require_sound_config(path)
    with suppress(ValueError, RecursionError):  # `read_config` reports it
        architectures = json.loads(file.read_text(encoding="utf-8")).get("architectures") or [""]
        if str(architectures[0]).endswith("Classification"):
            raise ModelError(
                f"'{path}' is a {architectures[0]} (a classifier or reward model), which does not generate text; give "
                "a causal language model here, and a reward model as reward.model_path."
            )


def vocabulary_size(path: str | Path) -> int:
    """Return the number of entries of a model's embedding, including entries that its tokenizer does not use."""
    return model_config(path).get_text_config().vocab_size


def model_config(path: str | Path) -> PretrainedConfig:
    """Return the configuration of a model directory. Raises ModelError if it cannot be read or is unsupported."""
    try:
        with quiet_transformers():
            return read_config(path)
    except LOADING_ERRORS as error:
        raise cannot_be_loaded(path, AutoModelForCausalLM, error) from error


def is_tied(config: PretrainedConfig) -> bool:
    """Return whether the head of a language model is its embedding."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def cannot_be_loaded(path: str | Path, auto_class: Any, error: Exception) -> ModelError:
    """Return the ModelError for an error of transformers or safetensors."""
    kind, reason = auto_class.__name__.removeprefix("AutoModelFor"), " ".join(str(error).split())
    if str(error) == repr(ATTENTION):
        model_type = AutoConfig.from_pretrained(Path(path), trust_remote_code=False).model_type
        return ModelError(f"{model_type} models are not supported: their attention is not replaceable; {USE_INSTEAD}")
    if "trust_remote_code" in reason:
        reason = "it needs code of its directory, which hybridflow does not run"
    return ModelError(
        f"'{path}' cannot be loaded as a {kind} model: {reason[:300].rstrip('.')}. The directory must hold the "
        "config.json of a supported model and its whole weights as model.safetensors (or shards with their index); "
        f"{USE_INSTEAD}"
    )


def require_shape(path: str | Path, name: str, stored: Iterable[int], wanted: Iterable[int]) -> None:
    """Raise ModelError if a stored weight does not have the shape that the configuration requires."""
    if tuple(stored) != tuple(wanted):
        raise ModelError(
            f"'{path}': {name} has shape {tuple(stored)} in the weights, but {tuple(wanted)} by config.json; they are "
            "of different models, copy both again."
        )


def require_complete(path: str | Path, missing: Iterable[str]) -> None:
    """Raise ModelError if weights are missing."""
    if names := sorted(missing):
        raise ModelError(
            f"'{path}': the weights lack {_listed(names)}, which config.json requires; the files are incomplete or of "
            "a different model, copy them again."
        )


def require_no_ignored_layer(path: str | Path, names: Iterable[str], ignorable: Iterable[str] = ()) -> None:
    """Raise ModelError if stored weights of layers are not part of the model: without them it is another model.

    Other ignored weights are logged, except heads: a critic ignores a policy's head. `ignorable` are patterns of names
    that the model's code ignores on purpose, and frequencies of rotary embeddings are computed anew.
    """
    patterns = [*ignorable, r"inv_freq$"]
    ignored = sorted(n for n in names if not n.startswith(HEADS) and not any(re.search(p, n) for p in patterns))
    if layers := [name for name in ignored if _OF_LAYER.search(name)]:
        raise ModelError(
            f"'{path}': the weights have {_listed(layers)}, which the model of config.json does not have; without them "
            "it would be another model, copy both again."
        )
    if ignored:
        logger.warning("'%s' has weights that are not part of its config.json's model: %s", path, _listed(ignored))


def turn_off_dropout(model: nn.Module) -> None:
    """Set all dropout rates to 0, so that a token's log-prob does not depend on the pass that computes it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # rates stored as attributes, such as attention_dropout
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the log and the progress bars of transformers, which report a missing value head."""
    verbosity, progress = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()
