"""Expert parallel: each rank of an axis holds a part of the experts of a layer, and tokens go to the rank of theirs.

transformers has the exchange, which is one all-to-all before and one after the experts. It sums gradients of an expert
over the ranks whose tokens it computes.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.expert_parallel import apply_expert_parallelism

from hybridflow.errors import ModelConfigError
from hybridflow.models.experts import experts_of, sizes_of_experts


def require_expert_parallel(model: Any, size: int) -> None:
    """Raise ModelConfigError unless each of `size` ranks can hold as many experts of the model as every other."""
    if size == 1:
        return
    kind, sizes = model.config.model_type, sizes_of_experts(model.config)
    if not experts_of(model) or sizes is None:
        raise ModelConfigError(
            f"parallel.expert={size} is not supported for {kind} models, which have no experts that transformers can "
            "place on ranks; use parallel.expert = 1."
        )
    if sizes[1] % size:
        raise ModelConfigError(
            f"parallel.expert={size} does not divide the {sizes[1]} experts of this model; use a divisor of them."
        )


def distribute_experts(model: nn.Module, experts: DeviceMesh, same_tokens: DeviceMesh) -> None:
    """Replace the weights of experts by DTensors on the axis `experts`, and let tokens be exchanged over it.

    `same_tokens`: the axis of ranks with equal tokens, of one rank.
    """
    found, plan = experts_of(model), {}
    for name, module in model.named_modules():
        if module in found:
            plan |= {f"{name}.{parameter}": "grouped_gemm" for parameter in module._parameters}
            plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(model, experts, same_tokens, plan, "all_to_all")
