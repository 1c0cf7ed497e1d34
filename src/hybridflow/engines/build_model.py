"""The model of an engine: whole in one process, or this rank's shards of it."""

from typing import Literal

import torch
from transformers import PreTrainedModel

from hybridflow.config import LoRAConfig
from hybridflow.engines.ranks import TENSOR, Ranks
from hybridflow.engines.sharding import shard_model
from hybridflow.models.expert_parallel import require_expert_parallel
from hybridflow.models.forward import Forward
from hybridflow.models.forward_of import forward_of
from hybridflow.models.loading import build_without_weights, load_causal_lm, load_shards, load_value_model
from hybridflow.models.lora import add_adapters
from hybridflow.models.tensor_parallel import TensorRanks, require_tensor_parallel


def build_model(
    path: str,
    head: Literal["policy", "value"],
    ranks: Ranks,
    device: torch.device,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    lora: LoRAConfig | None,
    adapter_dtype: torch.dtype,
    on_host: bool,
    exact: bool,
) -> tuple[PreTrainedModel, Forward]:
    """Load the model, whole or this rank's shards, and choose its forward pass; adapters are not yet filled.

    `dtype` is that of its weights; `exact` as in `forward_of`. Raises ModelError if the parallel sizes are not
    supported for the model.
    """
    if ranks.is_alone:
        load = load_causal_lm if head == "policy" else load_value_model
        model = load(path, dtype)
        torch.nn.Module.to(model, device)
        if lora:
            add_adapters(model, lora, adapter_dtype)
        return model, forward_of(model, exact=exact)
    model = build_without_weights(path, head, dtype)
    require_tensor_parallel(model.config, ranks.tensor)
    require_expert_parallel(model.config, ranks.expert, model)
    if lora:
        add_adapters(model, lora, adapter_dtype)
    shard_model(model, ranks, device, compute_dtype, on_host=on_host)
    load_shards(model, path)
    tensor = TensorRanks(ranks.group(TENSOR)) if ranks.tensor > 1 else None
    return model, forward_of(model, is_sharded=True, tensor=tensor, exact=exact)
