"""Loading a sharded model: it is built on the meta device, then filled one parameter at a time.

A rank holds at most its shards and one whole parameter.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.initialization import no_init_weights

from hybridflow.models.attention import ATTENTION
from hybridflow.models.loading import (
    LOADING_ERRORS,
    VALUE_HEAD,
    VALUE_MODEL,
    cannot_be_loaded,
    is_tied,
    quiet_transformers,
    read_config,
    require_complete,
    require_language_model,
    require_no_ignored_layer,
    require_shape,
    require_value_head,
    turn_off_dropout,
)
from hybridflow.models.lora import is_adapter, plain_name
from hybridflow.models.model_files import require_finite
from hybridflow.models.parameters import part_like, persistent_buffers, replace_parameters
from hybridflow.models.stored_model import ModelTensors, StoredModel
from hybridflow.runtime.boxes import local

Head = Literal["policy", "value"]


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
    model.tie_weights()
    turn_off_dropout(model)
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
            whole = stored.read(plain_name(name)).to(parameter.dtype)
            require_finite(path, name, whole)
            local(parameter).copy_(part_like(whole, parameter))
        require_no_ignored_layer(path, stored.ignored, model._keys_to_ignore_on_load_unexpected or ())


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
