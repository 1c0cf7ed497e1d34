"""Low-rank adapters (LoRA; Hu et al., 2022) by peft: W + alpha / rank * B A. Only A and B learn; B starts at zero."""

import math
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hybridflow.config import LoRAConfig
from hybridflow.errors import ModelConfigError
from hybridflow.models.parameters import part_like
from hybridflow.runtime.boxes import Box, empty_box, whole_box
from hybridflow.runtime.random_streams import derive_seed

ADAPTER, BASE = ".lora_", ".base_layer"
FIRST, SECOND = ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: PreTrainedModel, config: LoRAConfig, dtype: torch.dtype) -> None:
    """Add uninitialized adapters to the linear layers of `config.targets`, and freeze all other parameters.

    Raises ModelError if peft is missing, or the model has no such layers, or they do not support these adapters.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelConfigError(
            f"lora.rank={config.rank} requires peft ({error}); install it with `pip install hybridflow[lora]`."
        ) from error
    plain = torch.nn.Linear.forward  # a router may be a Linear with other outputs
    linear = {name: m for name, m in model.named_modules() if getattr(type(m), "forward", None) is plain}
    names = {name.rpartition(".")[2] for name in linear}
    if missing := [target for target in config.targets if target not in names]:
        raise ModelConfigError(
            f"lora.targets: the model has no linear layer named {', '.join(missing)}; valid names: "
            f"{', '.join(sorted(names))}."
        )
    _require_suitable_targets(model, linear, config)
    model.requires_grad_(False)
    peft_config = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  (any number)
        target_modules=list(config.targets),
        lora_dropout=0.0,
        init_lora_weights=False,
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # of names that match nothing, which is an error below
            inject_adapter_in_model(peft_config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ModelConfigError(f"lora.targets={list(config.targets)} is invalid: {error}") from error
    _require_linear_layers(model, config)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:  # an adapter, on the meta device
                setattr(module, name, torch.nn.Parameter(parameter.detach().to(dtype)))


def _require_suitable_targets(model: PreTrainedModel, linear: Mapping[str, Any], config: LoRAConfig) -> None:
    """Raise ModelError for a layer whose weight is tied to the embedding, and for a rank larger than all layers."""
    layers = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in config.targets}
    embedding: Any = model.get_input_embeddings().weight
    if tied := [name for name, layer in layers.items() if layer.weight is embedding]:
        raise ModelConfigError(
            f"lora.targets: the weight of {tied[0]} is tied to the input embedding (tie_word_embeddings), so adapters "
            f"cannot be merged into it; remove {tied[0]}."
        )
    largest = max(min(layer.weight.shape) for layer in layers.values())
    if config.rank > largest:
        raise ModelConfigError(
            f"lora.rank={config.rank} exceeds the smaller dimension of every layer in lora.targets; use at most "
            f"{largest}, which is equivalent to training the full layers."
        )


def _require_linear_layers(model: PreTrainedModel, config: LoRAConfig) -> None:
    """Raise ModelError for targets that peft takes for the names of experts, which are fused in one weight.

    Adapters of fused experts are neither merged nor synced here.
    """
    layers = [name.removesuffix(FIRST) for name, _ in model.named_parameters() if name.endswith(FIRST)]
    if experts := [target for target in config.targets if not any(f".{x}".endswith(f".{target}") for x in layers)]:
        raise ModelConfigError(
            f"lora.targets: {', '.join(experts)} are the experts of {model.config.model_type} models, on which "
            "adapters are not supported; remove them."
        )


@torch.no_grad()
def fill_adapters(model: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Initialize the adapters: A uniform as in peft, from the seed and the layer's name; B zero.

    The values do not depend on how ranks shard them.
    """
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{module_name}.{name}"
            if not is_adapter(full_name):
                continue
            whole = torch.zeros(parameter.shape, dtype=parameter.dtype)
            if full_name.endswith(FIRST):
                generator = torch.Generator().manual_seed(derive_seed(seed, zlib.crc32(full_name.encode())))
                bound = 1 / math.sqrt(parameter.shape[1])
                noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                whole.copy_((2 * noise - 1) * bound)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(part_like(whole, parameter))
            else:
                setattr(module, name, torch.nn.Parameter(whole.to(device)))


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters inside the context, so that the model computes as the base model."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "enable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return ADAPTER in name


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model without adapters."""
    return name.replace(BASE, "")


def boxes_before_merging(parameters: Mapping[str, Tensor], boxes: Mapping[str, Box]) -> dict[str, Box]:
    """Return the boxes of parameters from which the `boxes` of merged weights are computed.

    Only those of weights that a rank wants whole, or not at all; a slice of a weight is merged whole.
    """
    before: dict[str, Box] = {}
    shapes = {plain_name(name): parameter.shape for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        merged = name.partition(ADAPTER)[0] + ".weight" if is_adapter(name) else plain_name(name)
        for box_of in (whole_box, empty_box):
            if boxes.get(merged) == box_of(shapes[merged]):
                before[name] = box_of(parameter.shape)
    return before


def plain_adapter_name(name: str) -> str:
    """Return the name of an adapter's parameter in an adapter's files."""
    return name.replace(".default.weight", ".weight")


def adapter_shapes(model: PreTrainedModel, config: LoRAConfig) -> dict[str, torch.Size]:
    """Return the names and shapes of the parameters that `add_adapters` adds to a model without adapters."""
    shapes = {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in config.targets and isinstance(layer, torch.nn.Linear):
            rows, columns = layer.weight.shape
            shapes |= {name + FIRST: torch.Size((config.rank, columns)), name + SECOND: torch.Size((rows, config.rank))}
    return shapes


def separate_adapters(
    names: Iterable[str], weight_of: Callable[[str], Tensor], scaling: float, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters in a dtype, A, and B multiplied by the scaling, so that W + B A are the merged weights."""
    for name in filter(is_adapter, names):
        weight = weight_of(name)
        yield name, (scaling * weight if name.endswith(SECOND) else weight).to(dtype)


def merged_weights(
    names: Collection[str], weight_of: Callable[[str], Tensor], scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the base model merged with the adapters; `names` are those of the model with adapters.

    One weight at a time, in its dtype; products are in float32 or wider.
    """
    for name in names:
        if is_adapter(name):
            continue
        plain, weight = plain_name(name), weight_of(name)
        layer = plain.removesuffix(".weight")
        adapters = {part: weight_of(part) for part in (layer + FIRST, layer + SECOND) if part in names}
        yield plain, merged_weight(plain, weight, adapters, scaling)


def merged_weight(name: str, weight: Tensor, adapters: Mapping[str, Tensor], scaling: float) -> Tensor:
    """Return a weight merged with the adapters of its layer, if it has any; in the dtype of the weight."""
    layer = name.removesuffix(".weight")
    if layer == name or layer + FIRST not in adapters:
        return weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    first, second = adapters[layer + FIRST].to(wide), adapters[layer + SECOND].to(wide)
    return (weight.to(wide) + scaling * (second @ first)).to(weight.dtype)
