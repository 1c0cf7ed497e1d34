"""FSDP2: sharded parameters, gradients and optimizer state, gathered unit by unit (Zhao et al., 2023)."""

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

from hybridflow.engines.ranks import EXPERT, EXPERT_SHARD, TENSOR, Ranks
from hybridflow.models.expert_parallel import distribute_experts
from hybridflow.models.experts import experts_of
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
    if ranks.expert > 1:
        distribute_experts(model, ranks.axis(EXPERT))
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
    for experts in experts_of(model) if ranks.expert > 1 else ():
        of_experts: dict[str, Any] = {**options, "mesh": ranks.axis(EXPERT_SHARD)}
        fully_shard(experts, **of_experts)
    for unit in units_of(model):
        # The head's backward pass follows its forward pass.
        sharded = fully_shard(unit, reshard_after_forward=unit is not model.get_output_embeddings(), **options)
        if unit is model.get_input_embeddings():
            sharded.set_unshard_in_backward(False)  # its gradient needs the token ids only
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo ignores the divide factor of a mean, so the reduction is a sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if device.type == "cuda":
        prefetch_units(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if on_host else device)
    with torch.no_grad():
        for name, buffer in buffers.items():
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, buffer.to(device))


def prefetch_units(model: PreTrainedModel) -> None:
    """Gather the weights of each unit in the forward pass while the unit before computes.

    By default the host asks for them when it reaches the unit, which is late if it is not far ahead of the device. In
    the backward pass FSDP2 does so by itself. One more unit is gathered at a time.
    """
    for module, following in pairwise([model, *units_of(model)]):
        assert isinstance(module, FSDPModule)
        assert isinstance(following, FSDPModule)
        module.set_modules_to_forward_prefetch([following])


def reshard(model: nn.Module) -> None:
    """Free the gathered weights of all units, as a backward pass does; some stay gathered after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def units_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules whose weights FSDP2 gathers one after another: embedding, decoder layers, head.

    All other weights are gathered for the whole forward and backward pass: final norm, value head, an embedding and a
    head that share their weight, and a head with a bias, whose results would be views, which FSDP2 does not support.
    Layers are the modules that the model's family must not split. FSDP2 makes the class of a sharded module a subclass
    of another name.
    """
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if kinds & {base.__name__ for base in type(module).__mro__}]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        return layers
    return [embedding, *layers, *([head] if head is not None and head.bias is None else [])]
