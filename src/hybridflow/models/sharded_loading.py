"""Loading a sharded model: it is built on the meta device, then filled one parameter at a time.

A rank holds at most its shards and one whole parameter.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.initialization import no_init_weights

from hybridflow.errors import ModelError
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
    turn_off_dropout,
)
from hybridflow.models.lora import is_adapter, plain_name
from hybridflow.models.model_files import INDEX, SINGLE, require_finite, require_sound_weights, weight_files
from hybridflow.models.parameters import part_like, replace_parameters
from hybridflow.runtime.boxes import local

Head = Literal["policy", "value"]

BODY = "model."
"""Prefix of the body's parameters in a model with a head; a directory of the body alone leaves it out."""


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
    model.tie_weights()
    turn_off_dropout(model)
    return model.eval()


def build_with_placeholders(path: str | Path, head: Head, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the model on `device` with placeholders, which take no memory until `data` of a parameter is assigned."""
    model = build_without_weights(path, head, dtype)
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
    with StoredModel(path, is_tied=has_tied_head) as stored:
        parameters = {name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)}
        wanted = {name: stored.name_of(plain_name(name)) for name in parameters}
        require_complete(path, (n for n, found in wanted.items() if found is None and not n.startswith(VALUE_HEAD)))
        for name, parameter in parameters.items():
            found = wanted[name]
            if found is None:
                local(parameter).zero_()
                continue
            require_shape(path, name, stored.shape(found), parameter.shape)
            whole = stored.read(found).to(parameter.dtype)
            require_finite(path, name, whole)
            local(parameter).copy_(part_like(whole, parameter))
        tied = {stored.name_of(name) for name in model.state_dict(keep_vars=True)}
        ignored = set(stored.names) - {name for name in wanted.values() if name} - {name for name in tied if name}
        require_no_ignored_layer(path, ignored, model._keys_to_ignore_on_load_unexpected or ())


class StoredModel:
    """The tensors of a model directory by their stored names, read one at a time."""

    def __init__(self, path: str | Path, *, is_tied: bool = False) -> None:
        self.path, self._open = Path(path), ExitStack()
        self._files: dict[str, Any] = {}
        try:
            require_sound_weights(path, is_tied=is_tied)
            for file_path in weight_files(path):
                file: Any = self._open.enter_context(safe_open(file_path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except LOADING_ERRORS as error:
            self._open.close()
            raise ModelError(
                f"'{path}': the weights cannot be read: {' '.join(str(error).split())}. The directory must hold "
                f"{SINGLE}, or {INDEX} and every file that it lists; copy them again."
            ) from error

    @property
    def names(self) -> list[str]:
        """Names of all stored tensors."""
        return list(self._files)

    def name_of(self, parameter: str) -> str | None:
        """Return the stored name of a parameter, with or without the prefix of the body; None if it is not stored."""
        candidates = (parameter, parameter.removeprefix(BODY), BODY + parameter)
        return next((name for name in candidates if name in self._files), None)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a stored tensor without reading it."""
        return self._files[name].get_slice(name).get_shape()

    def read(self, name: str) -> Tensor:
        """Read a stored tensor."""
        return self._files[name].get_tensor(name)

    def __enter__(self) -> "StoredModel":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.close()


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
