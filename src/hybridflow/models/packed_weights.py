"""A decoder's weights laid out for generation: those of one input as one product, in the order that oneDNN reads.

A copy, made when generation starts and dropped when it ends. PyTorch's own product would put the weights into that
order on every call, which for few rows costs more than the product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hybridflow.kernels import rms_norm, rotary, silu_mul
from hybridflow.models.attention import AttentionPlan

_ops: Any = torch.ops.mkldnn


class PackedLinear:
    """The linear layers of one input, side by side: x (rows, in) -> (rows, sum of outs)."""

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        weights = [module.weight.detach() for module in modules]
        biases = [module.bias for module in modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._bias = None
        if any(bias is not None for bias in biases):
            zeros = [w.new_zeros(len(w)) for w in weights]
            self._bias = torch.cat([z if b is None else b.detach() for b, z in zip(biases, zeros, strict=True)])
        self._is_packed = is_packable(weight)
        self._weight = _ops._reorder_linear_weight(weight, None) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_packed:
            return _ops._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the product."""
        if self._is_packed:
            return _ops._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return residual + linear(x, self._weight, self._bias)


class PackedLayer:
    """One decoder layer without gradient: the mathematics of the fused forward pass in fewer, larger steps."""

    def __init__(self, layer: Any, epsilon: float) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._epsilon, self._scaling, self._head_dim = epsilon, attention.scaling, attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._qk_size = attention.q_proj.out_features + attention.k_proj.out_features
        self._norm = layer.input_layernorm.weight.detach()
        self._mlp_norm = layer.post_attention_layernorm.weight.detach()
        self._head_norms = None
        if hasattr(attention, "q_norm"):
            self._head_norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        self._qkv = PackedLinear([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = PackedLinear([attention.o_proj])
        self._gate_up = PackedLinear([mlp.gate_proj, mlp.up_proj])
        self._down = PackedLinear([mlp.down_proj])

    def __call__(self, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, plan: AttentionPlan, batch: int) -> Tensor:
        """hidden (batch * tokens, width) in and out."""
        projected = self._qkv(rms_norm(hidden, self._norm, self._epsilon)).view(len(hidden), -1, self._head_dim)
        num_turned = self._qk_size // self._head_dim
        turned, value = projected[:, :num_turned], projected[:, num_turned:]
        if self._head_norms:
            query, key = turned[:, : self._num_heads], turned[:, self._num_heads :]
            query_norm, key_norm = self._head_norms
            turned = torch.cat(
                [rms_norm(query, query_norm, self._epsilon), rms_norm(key, key_norm, self._epsilon)], dim=1
            )
        turned = rotary(turned, cos, sin)
        query, key = turned[:, : self._num_heads], turned[:, self._num_heads :]
        query, key, value = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (query, key, value))
        attended = plan.attend(index, query, key, value, self._scaling).reshape(len(hidden), -1)
        hidden = self._out.add_to(hidden, attended)
        gate, up = self._gate_up(rms_norm(hidden, self._mlp_norm, self._epsilon)).chunk(2, dim=-1)
        return self._down.add_to(hidden, silu_mul(gate, up))


class PackedWeights:
    """The layers and the head of a decoder."""

    def __init__(self, layers: list[PackedLayer], head: PackedLinear) -> None:
        self.layers, self.head = layers, head

    @classmethod
    def of(cls, body: Any, head: nn.Module, epsilon: float) -> "PackedWeights | None":
        """None where there is nothing to gain, or where a product is more than that: an adapter must be called."""
        products = [module for layer in body.layers for name, module in layer.named_modules() if name.endswith("_proj")]
        if not all(type(module) is nn.Linear for module in [*products, head]) or not is_packable(products[0].weight):
            return None
        return cls([PackedLayer(layer, epsilon) for layer in body.layers], PackedLinear([head]))  # pyright: ignore[reportArgumentType]


def is_packable(weight: Tensor) -> bool:
    """Whether oneDNN takes weights like this: float32 or bfloat16 on a CPU, in a PyTorch that has it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(_ops, "_reorder_linear_weight")
        and hasattr(_ops, "_linear_pointwise")
    )
