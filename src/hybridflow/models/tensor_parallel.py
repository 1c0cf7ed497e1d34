"""Tensor parallel: the axis along which each weight is sharded, and the communication inside a layer.

    x ──copy──> columns of q, k, v, gate, up ──heads of this rank──> rows of o, down ──sum──> the same on every rank

Each rank has some heads of attention, some columns of the MLP and some entries of the vocabulary (Shoeybi et al., 2019,
Megatron-LM). Values between `copy` and `sum` differ between ranks; all other values are equal on all ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import embedding, linear

from hybridflow.errors import ModelConfigError
from hybridflow.models.parameters import replace_parameters
from hybridflow.models.support import FUSED_FAMILIES
from hybridflow.runtime.boxes import local

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
"""Modules whose outputs are sharded: weight and bias are sharded along their first axis."""

BY_COLUMNS = ("o_proj", "down_proj")
"""Modules whose inputs are sharded: the weight is sharded along its second axis, and each rank computes a partial
sum."""


def placement_of(name: str) -> Placement:
    """Return the placement of the parameter of this name."""
    *_, module, kind = name.split(".")
    if module in BY_ROWS:
        return Shard(0)
    return Shard(1) if module in BY_COLUMNS and kind == "weight" else Replicate()


def require_tensor_parallel(config: Any, size: int) -> None:
    """Raise ModelError unless the layers of such a model can be sharded over `size` ranks."""
    if size == 1:
        return
    if config.model_type not in FUSED_FAMILIES:
        raise ModelConfigError(
            f"parallel.tensor={size} is not supported for {config.model_type} models, only for "
            f"{', '.join(FUSED_FAMILIES)}; use parallel.tensor = 1, which shards weights over all ranks as well."
        )
    counts = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
    }
    if wrong := [f"{key}={count}" for key, count in counts.items() if count % size]:
        raise ModelConfigError(
            f"parallel.tensor={size} does not divide {' and '.join(wrong)} of this model; use a common divisor, and "
            "parallel.sequence for the other ranks."
        )
    entries = config.vocab_size
    if (size - 1) * -(-entries // size) >= entries:
        raise ModelConfigError(
            f"parallel.tensor={size} is too large for vocab_size={entries}: a rank would have no entries; use fewer."
        )


def distribute_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by its DTensor on a one-axis mesh, without communication; tied parameters stay tied."""

    def distributed(name: str, parameter: nn.Parameter) -> nn.Parameter:
        shared = distribute_tensor(parameter.detach(), mesh, [placement_of(name)], src_data_rank=None)
        return nn.Parameter(shared, requires_grad=parameter.requires_grad)

    replace_parameters(model, distributed)


class TensorRanks:
    """The communication between the tensor parallel ranks of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._name = group.group_name

    def copy(self, x: Tensor) -> Tensor:
        """Return x, which is equal on all ranks; the backward pass sums the gradients of the ranks."""
        return _Copy.apply(x, self._name)

    def linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        """Compute this rank's outputs of a module with sharded outputs."""
        return linear(x, local(module.weight), local(module.bias))

    def linear_sum(self, module: nn.Linear, x: Tensor) -> Tensor:
        """Compute the whole output, equal on all ranks, of a module with sharded inputs."""
        out = _Sum.apply(linear(x, local(module.weight)), self._name)
        return out if module.bias is None else out + local(module.bias)

    def embed(self, module: nn.Embedding, ids: Tensor) -> Tensor:
        """Compute embeddings of ids from a vocabulary sharded over ranks; no gradient for `padding_idx`."""
        weight: Any = local(module.weight)
        first = self._rank * self.part(module.weight.shape[0])
        is_here = (ids >= first) & (ids < first + len(weight))
        padding = module.padding_idx
        padding = padding - first if padding is not None and first <= padding < first + len(weight) else None
        found = embedding((ids - first).where(is_here, 0), weight, padding)
        return _Sum.apply(found * is_here.unsqueeze(-1), self._name)

    def logits(self, module: nn.Linear, x: Tensor) -> Tensor:
        """Compute logits (tokens, entries) of this rank's entries of the vocabulary."""
        return linear(self.copy(x), local(module.weight), local(module.bias))

    def vocabulary(self, size: int) -> "VocabularyRanks":
        """Return the assignment of `size` entries to the ranks."""
        return VocabularyRanks(self._rank * self.part(size), size, self._group)

    def part(self, count: int) -> int:
        """Return the number of entries of each rank; the last ranks may have fewer."""
        return -(-count // self._size)


@dataclass(frozen=True)
class VocabularyRanks:
    """A vocabulary sharded over ranks; implements `VocabularyShare` of `hybridflow.algorithms`."""

    first: int
    size: int
    group: dist.ProcessGroup

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def logsumexp(self, x: Tensor) -> Tensor:
        """Return log sum exp of x over the ranks."""
        return self.gather(x).logsumexp(0)

    def gather(self, x: Tensor) -> Tensor:
        """Return x of each rank, (ranks, *x.shape)."""
        parts = x.new_empty(self.group.size(), *x.shape)
        dist.all_gather(list(parts), x.contiguous(), group=self.group)
        return parts


def _summed(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over the ranks of the group of this name, by operations that torch.compile traces."""
    collectives = torch.ops._c10d_functional
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None
