"""FSDP2: sharded parameters, gradients and optimizer state, gathered layer by layer (Zhao et al., 2023)."""

import logging
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from hybridflow.engines.ranks import TENSOR, Ranks
from hybridflow.models.tensor_parallel import distribute_parameters

# It warns that weights under both FSDP and tensor parallel are gathered along one axis after the other.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def shard_model(
    model: PreTrainedModel, ranks: Ranks, device: torch.device, compute_dtype: torch.dtype, *, on_host: bool = False
) -> None:
    """Shard the parameters of a model on the meta device over the ranks, and allocate memory for this rank's shards.

    Gradients are summed, not averaged, because losses are already divided by global counts; in float32 if the model
    computes in bfloat16. `on_host`: shards, gradients and optimizer state stay in host memory.
    """
    if ranks.tensor > 1:
        distribute_parameters(model, ranks.axis(TENSOR))
    in_bfloat16 = compute_dtype == torch.bfloat16
    options: dict[str, Any] = {
        "mesh": ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype if in_bfloat16 else None,
            reduce_dtype=torch.float32 if in_bfloat16 else None,
            cast_forward_inputs=False,  # rotary angles keep their precision
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy(),
    }
    for layer in layers_of(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo ignores the divide factor of a mean, so the reduction is a sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if device.type == "cuda":
        prefetch_layers(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if on_host else device)
    with torch.no_grad():
        for name, buffer in buffers.items():
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, buffer.to(device))


def prefetch_layers(model: PreTrainedModel) -> None:
    """Gather the weights of each layer in the forward pass while the layer before computes.

    By default the host asks for them when it reaches the layer, which is late if it is not far ahead of the device. In
    the backward pass FSDP2 does so by itself. One more layer is gathered at a time.
    """
    for module, following in pairwise([model, *layers_of(model)]):
        assert isinstance(module, FSDPModule)
        assert isinstance(following, FSDPModule)
        module.set_modules_to_forward_prefetch([following])


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, which are the modules that the model's family must not split.

    FSDP2 makes the class of a sharded module a subclass of another name.
    """
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if kinds & {base.__name__ for base in type(module).__mro__}]
